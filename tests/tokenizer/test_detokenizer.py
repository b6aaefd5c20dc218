"""Streaming equals decoding at once, whatever the tokens and the stop strings (fault 39)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tokenizer.kimi_vocabulary import SPECIAL_IDS, VOCAB_SIZE

from deltafold.tokenizer.detokenizer import Detokenizer
from deltafold.tokenizer.tokenizer import Tokenizer


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The rule at once: the stop string that ends first, of those the longest."""
    ends = [(text.find(item) + len(item), -len(item), item) for item in stop if item in text]
    if not ends:
        return text, None
    end, length, found = min(ends)
    return text[: end + length], found


def stream(pieces: Sequence[bytes], stop: Sequence[str]) -> tuple[list[str], str, str | None]:
    """Pushes' texts, flush's text, the stop string found."""
    detokenizer = Detokenizer(pieces.__getitem__, stop=stop)
    pushed = [detokenizer.push(index) for index in range(len(pieces))]
    return pushed, detokenizer.flush(), detokenizer.stop_string


def split_bytes(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


STOPS = st.lists(st.text("ab中😀\ufffd", min_size=1, max_size=5), max_size=4)
DATA = st.one_of(
    st.text("ab中😀é", max_size=40).map(str.encode),
    st.lists(st.sampled_from([b"a", b"b", b"\xe4", b"\xb8\xad", b"\xf0\x9f", b"\x98\x80", b"\xff"]), max_size=30).map(
        b"".join
    ),
    st.binary(max_size=20),
)


@settings(max_examples=400, deadline=None)
@given(data=DATA, cuts=st.lists(st.integers(0, 200), max_size=40), stop=STOPS)
@example(data=b"aab", cuts=[1, 2], stop=["ab", "aac"])
@example(data=b"abcd", cuts=[], stop=["abcd", "bc"])
@example(data="a中".encode(), cuts=[2, 3], stop=["中"])
@example(data=b"ab\xe4", cuts=[1, 2], stop=["ab\ufffd"])
def test_streamed_text_equals_text_at_once(data: bytes, cuts: list[int], stop: list[str]) -> None:
    pushed, flushed, found = stream(split_bytes(data, cuts), stop)
    expected, stopped = cut_at_stop(data.decode("utf-8", "replace"), stop)
    assert "".join(pushed) + flushed == expected
    assert found == stopped


@settings(max_examples=200, deadline=None)
@given(data=st.text("ab中😀", max_size=30).map(str.encode), stop=STOPS)
def test_nothing_uncertain_is_pushed_and_nothing_certain_held(data: bytes, stop: list[str]) -> None:
    """One byte a token: after each, the text out is all but half a character and the longest begun stop string."""
    detokenizer = Detokenizer(lambda byte: bytes((byte,)), stop=stop)
    out = ""
    for end, byte in enumerate(data, start=1):
        out += detokenizer.push(byte)
        whole = data[:end].decode("utf-8", "ignore")
        certain, found = cut_at_stop(whole, stop)
        if found is None:
            begun = (whole[start:] for start in range(len(whole)))
            held = next((tail for tail in begun if any(item.startswith(tail) for item in stop)), "")
            certain = whole[: len(whole) - len(held)]
        assert out == certain
        assert detokenizer.stop_string == found


def test_a_character_split_over_tokens_and_one_never_completed() -> None:
    pieces = ["😀".encode()[:1], "😀".encode()[1:3], "😀".encode()[3:] + b"x", b"\xe4\xb8"]
    assert stream(pieces, []) == (["", "", "😀x", ""], "\ufffd", None)


def test_a_stop_string_split_over_tokens_is_never_shown() -> None:
    assert stream([b"one E", b"N", b"D two"], ["END"]) == (["one ", "", ""], "", "END")
    assert stream([b"one E", b"N", b"d two"], ["END"]) == (["one ", "", "ENd two"], "", None)
    assert stream([b"one E", b"N"], ["END"]) == (["one ", ""], "EN", None)


def test_flush_gives_its_text_once() -> None:
    detokenizer = Detokenizer(lambda _: b"E", stop=["END"])
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "E", "")


def test_special_tokens_are_not_text_and_do_not_hide_a_stop_string(tokenizer: Tokenizer) -> None:
    inner = [SPECIAL_IDS["<|im_middle|>"], VOCAB_SIZE - 1]
    token_ids = [*tokenizer.encode("the EN"), *inner, *tokenizer.encode("D river")]
    assert tokenizer.decode(token_ids) == "the END river"
    detokenizer = tokenizer.detokenizer(stop=["END"])
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == "the "
    assert detokenizer.stop_string == "END"


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), stop=STOPS)
def test_any_ids_stream_as_they_decode(kimi: Tokenizer, token_ids: list[int], stop: list[str]) -> None:
    detokenizer = kimi.detokenizer(stop=stop)
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
    assert (text, detokenizer.stop_string) == cut_at_stop(kimi.decode(token_ids), stop)


def test_a_prompt_that_ends_inside_a_character(kimi: Tokenizer, ranks: list[bytes]) -> None:
    single = {token: token_id for token_id, token in enumerate(ranks)}
    smile = [single[bytes((byte,))] for byte in "😀".encode()]
    prompt = [*kimi.encode("the "), *smile[:2]]
    detokenizer = kimi.detokenizer(prompt_token_ids=prompt)
    assert [detokenizer.push(token_id) for token_id in smile[2:]] == ["", "😀"]
    assert kimi.detokenizer(prompt_token_ids=prompt).flush() == ""
    unfinished = kimi.detokenizer(prompt_token_ids=prompt)
    assert unfinished.push(single[b"a"]) == "\ufffda"
    whole = kimi.detokenizer(prompt_token_ids=[*prompt, *smile[2:]])
    assert whole.push(single[b"a"]) == "a"
    assert kimi.detokenizer(prompt_token_ids=smile[:3]).push(smile[3]) == "😀"


def test_work_per_token_does_not_grow_with_what_is_held() -> None:
    """A stop string of n repeats holds n characters back, and every mismatch lets some go: still linear."""
    steps = 0

    class CountingDict(dict[str, int]):
        def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().get(key, default)

    detokenizer = Detokenizer(lambda token_id: b"ab"[token_id : token_id + 1], stop=["a" * 2000 + "c"])
    matcher = detokenizer._matcher
    assert matcher is not None
    matcher._children = [CountingDict(children) for children in matcher._children]
    longest = 0
    for index in range(20_000):
        detokenizer.push(1 if index % 2500 == 2499 else 0)
        longest = max(longest, len(detokenizer._held))
    assert longest <= 2001
    assert steps <= 20_000
