"""The mixed corpus a tokenizer conversion is verified on: texts that differ wherever two splitters could."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_SAMPLES = (
    "",
    "In the beginning was the word, and every word was split into pieces that it didn't choose.",
    "I'm sure they'll say we've known; she'd go, it's THEY'RE, CAN'T, I'LL, o'clock, rock'n'roll 'tis 's 'S '\u017f",
    "\u5929\u5730\u7384\u9ec4\uff0c\u5b87\u5b99\u6d2a\u8352\u3002\u65e5\u6708\u76c8\u6603\uff0c\u8fb0\u5bbf\u5217\u5f20\u3002",
    "\u6a21\u578bKimi\u7ebf\u6027\u6ce8\u610f\u529bLinear2025\u5e7412\u6708\u3007\u516b\u65e5mixed\u6df7\u5408Text",
    "def f(x: int = 0x1F) -> dict[str, int]:\n    return {'a': x ** 2, \"b\": [*range(10)]}  # ok?!\n\n\n",
    '#include <stdio.h>\r\nint main(void){\r\n\tprintf("%d\\n", 1000000);\r\n\treturn 0;\r\n}\r\n',
    "\U0001f600\U0001f44d\U0001f3fd\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea \u2764\ufe0f\u2728",
    " a  b   c    d     e\t\tf\t g\n\nh\n \n i \r\n\r\n j\u00a0\u2003k \u3000 l\u0085m\u2028n   ",
    "0 01 012 0123 01234 3.14159e-10 1,000,000 \u0661\u0662\u0663\u0664 \u2167\u00bd\u00b2 \u4e00\u4e8c\u4e09 1st 2nd",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac "
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 caf\u00e9 cafe\u0301 \u01c5\u02b0\u00aa",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING_CASE kebab-case iPhone\u4e2d\u6587McDonald",
    "...!!! ??? --- *** ==> <|not_special|> [TAG] </s> {{x}} ~~~ ``` $$$ \u2014\u2026\u300c\u300d\u3001\n//\n",
)
_ALPHABETS = (
    "abcdefgh ",
    "aA'sStTrReEvVmMlLdD \u017f",
    " \t\n\r\u00a0\u2003",
    " x\n1",
    "\u4e2d\u6587\u5b57a1 \u3007\u302a",
    "0123456789 .,\u0661\u00bd",
    "\u0301\u200da\u00e9\u01c5\u02b0\u05d0 ",
    "\U0001f600\U0001f3fd\u200d\ufe0f \n",
    "<|>[]/_-=+*'\"\\ \r\n",
)


def _code_points(rng: random.Random) -> Iterator[str]:
    """Every character up to U+33FF and a sample above, alone among letters, digits and spaces."""
    points = [*range(0x3400), *(rng.randrange(0x3400, 0x110000) for _ in range(6000))]
    chars = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    for start in range(0, len(chars), 64):
        block = chars[start : start + 64]
        yield "".join(f"a{char}B {char}1" for char in block)
        yield "".join(block)


def verification_texts(special_names: Sequence[str]) -> Iterator[str]:
    """English, Chinese, code, emoji, space runs, contractions, digits, mixed scripts, bytes read as text, and
    texts around each of `special_names`. The same texts in the same order every time."""
    rng = random.Random(20251030)
    yield from _SAMPLES
    for length in range(1, 70):
        yield from (" " * length, "\n" * length, "x" + " " * length + "y", "a" * length, "\u4e2d" * length)
    for alphabet in _ALPHABETS:
        for _ in range(150):
            yield "".join(rng.choices(alphabet, k=rng.randrange(1, 60)))
    for _ in range(200):
        yield rng.randbytes(rng.randrange(1, 80)).decode("latin-1")
        yield rng.randbytes(rng.randrange(1, 80)).decode("utf-8", errors="replace")
    for _ in range(100):
        yield " ".join(rng.choices(_SAMPLES, k=2))
    yield from _code_points(rng)
    for name in special_names:
        yield f"before {name} after{name}{name}\n{name[:-1]}"
