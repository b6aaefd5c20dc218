"""The texts the built-in model is trained on, read out of unpacked Debian packages into plain documents.

One loader per package; each yields `Document`s in the source's own order, page furniture removed. `fetch` downloads
and unpacks the packages. The split, the duplicate guard and the chat data are made from these in data.py.
"""

from __future__ import annotations

import gzip
import html
import html.parser
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One text. `unit` names the stretch that goes to one split as a whole (a Bible chapter has the same unit in both
    translations); `entries` are (question term, answer) pairs found in it, from which chat turns are made."""

    source: str
    unit: str
    text: str
    entries: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Source:
    """A Debian package, its licence as its copyright file states it, and the loader for its text."""

    name: str
    package: str
    version: str
    licence: str
    what: str
    load: Callable[[Path], Iterator[Document]]


# ---- helpers -----------------------------------------------------------------------------------------------------

DOCUMENT_CHARS = 12_000  # long texts are cut at paragraph boundaries near this length


def tidy(text: str) -> str:
    """Collapse runs of blanks inside a paragraph; drop control characters."""
    text = text.replace("\u00a0", " ").replace("\u00ad", "")
    return re.sub(r"[ \t\r\n\f\v]+", " ", re.sub(r"[\x00-\x08\x0e-\x1f\x7f]", "", text)).strip()


def pack(source: str, unit: str, paragraphs: list[str]) -> Iterator[Document]:
    """Cut a list of paragraphs into documents of about DOCUMENT_CHARS characters."""
    piece: list[str] = []
    size, part = 0, 0
    for paragraph in paragraphs:
        if piece and size + len(paragraph) > DOCUMENT_CHARS:
            yield Document(source, f"{unit}#{part}", "\n\n".join(piece))
            piece, size, part = [], 0, part + 1
        piece.append(paragraph)
        size += len(paragraph) + 2
    if piece:
        yield Document(source, f"{unit}#{part}", "\n\n".join(piece))


def pack_entries(source: str, entries: list[tuple[str, str, str]], chars: int = 6_000) -> Iterator[Document]:
    """Group neighbouring dictionary entries (term, printed entry, answer for chat) into documents."""
    group: list[tuple[str, str, str]] = []
    size = 0
    for number, entry in enumerate([*entries, ("", "", "")]):
        last = number == len(entries)
        if group and (last or size + len(entry[1]) > chars):
            text = "\n\n".join(printed for _, printed, _ in group)
            yield Document(source, group[0][0], text, tuple((term, answer) for term, _, answer in group))
            group, size = [], 0
        group.append(entry)
        size += len(entry[1])


# ---- King James Version ------------------------------------------------------------------------------------------


def load_kjv(root: Path) -> Iterator[Document]:
    """The text file has a compression of its own; the package's reader (bible-kjv, unpacked beside it) prints it."""
    printed = subprocess.run(
        [
            root / "bible-kjv/usr/bin/bible",
            "-p",
            root / "bible-kjv-text/usr/lib",
            "gen1:1-rev22:21",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    ).stdout.decode("latin-1")
    heading = re.compile(r"^((?:[1-3] )?[A-Z][A-Za-z ]+?) (\d+)$")
    chapter, verses = "", [""]
    for line in [*printed.splitlines(), "End 0"]:
        if match := heading.match(line):
            verses = [tidy(verse) for verse in verses if verse.strip()]
            if verses:
                entries = tuple((f"{chapter}:{n}", verse) for n, verse in enumerate(verses, 1))
                yield Document("kjv", chapter, chapter + "\n\n" + "\n".join(verses), entries)
            chapter, verses = f"{match[1]} {match[2]}", []
        elif re.match(r"^ {1,3}\d+ ", line):
            verses.append(re.sub(r"^ +\d+ ", "", line))
        elif verses and line.strip():
            verses[-1] += " " + line


# ---- SWORD modules (World English Bible and three commentaries) -----------------------------------------------------


def sword_verses(base: Path, suffix: str) -> list[str]:
    """Entries of a zText/zCom module in index order: block index (12 bytes), verse index (10, zCom4: 12), zlib data."""
    blocks_index, verse_index, data = (base.with_name(base.name + "." + suffix + kind).read_bytes() for kind in "svz")
    blocks = []
    for offset, size, _ in struct.iter_unpack("<III", blocks_index):
        blocks.append(zlib.decompress(data[offset : offset + size]) if size else b"")
    layout = "<III" if suffix == "cz" else "<IIH"
    return [
        blocks[block][start : start + size].decode("utf-8", "replace") if size else ""
        for block, start, size in struct.iter_unpack(layout, verse_index)
    ]


def osis_paragraphs(markup: str) -> list[str]:
    """OSIS markup to paragraphs: notes and cross references go, titles and poetry lines break."""
    markup = re.sub(r"<note\b.*?</note>", " ", markup, flags=re.S)
    markup = re.sub(r'<title\b[^>]*type="(?:x-ms|runningHead)"[^>]*>.*?</title>', "\n\n", markup, flags=re.S)
    markup = re.sub(
        r"</?title\b[^>]*>|<div\b[^>]*type=\"(?:x-p|paragraph)\"[^>]*/>|<p\b[^>]*>|</p>|<lg\b[^>]*>", "\n\n", markup
    )
    markup = re.sub(r"<l\b[^>]*sID[^>]*/>|<l>|<lb\b[^>]*/>", "\v", markup)
    text = html.unescape(re.sub(r"<[^>]+>", "", markup))
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [tidy(line) for line in paragraph.split("\v")]
        joined = "\n".join(line for line in lines if line)
        if joined:
            paragraphs.append(re.sub(r" +([,.;:!?])", r"\1", joined))
    return paragraphs


BOOKS = {
    "Gen": "Genesis", "Exod": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deut": "Deuteronomy", "Josh": "Joshua",
    "Judg": "Judges", "Ruth": "Ruth", "1Sam": "1 Samuel", "2Sam": "2 Samuel", "1Kgs": "1 Kings", "2Kgs": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Esth": "Esther", "Job": "Job",
    "Ps": "Psalms", "Prov": "Proverbs", "Eccl": "Ecclesiastes", "Song": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Ezek": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nah": "Nahum", "Hab": "Habakkuk",
    "Zeph": "Zephaniah", "Hag": "Haggai", "Zech": "Zechariah", "Mal": "Malachi", "Matt": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phil": "Philippians", "Col": "Colossians", "1Thess": "1 Thessalonians",
    "2Thess": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phlm": "Philemon",
    "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1John": "1 John", "2John": "2 John",
    "3John": "3 John", "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip


def sword_chapters(base: Path, suffix: str) -> Iterator[tuple[str, str]]:
    """(chapter name, markup) for each chapter of both testaments; the same entry linked to many verses counts once."""
    for testament in ("ot", "nt"):
        if not (base / f"{testament}.{suffix}s").exists():
            continue
        name, markup, seen = "", "", ""
        for entry in sword_verses(base / testament, suffix):
            if match := re.search(r'<chapter\b[^>]*osisID="(\w+)\.(\d+)"', entry):
                if name and markup:
                    yield name, markup
                book = BOOKS.get(match[1])
                name, markup = (f"{book} {match[2]}" if book else ""), ""
            if entry and entry != seen:
                markup += entry + " "
                seen = entry
        if name and markup:
            yield name, markup


def load_web(root: Path) -> Iterator[Document]:
    base = root / "sword-text-web/usr/share/sword/modules/texts/ztext/engWEB2015eb"
    for chapter, markup in sword_chapters(base, "bz"):
        paragraphs = osis_paragraphs(markup)
        if paragraphs:
            yield Document("web", chapter, f"{chapter} (World English Bible)\n\n" + "\n\n".join(paragraphs))


def load_commentary(name: str, path: str, suffix: str, title: str) -> Callable[[Path], Iterator[Document]]:
    def load(root: Path) -> Iterator[Document]:
        for chapter, markup in sword_chapters(root / path, suffix):
            paragraphs = [p for p in osis_paragraphs(markup) if len(p) > 2]
            if paragraphs:
                yield from pack(name, f"{title} on {chapter}", [f"{title} on {chapter}", *paragraphs])

    return load


# ---- dictionaries ------------------------------------------------------------------------------------------------


def load_jargon(root: Path) -> Iterator[Document]:
    text = gzip.decompress((root / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode()
    paragraphs = [p for p in re.split(r"\n[ \t]*\n", text) if p.strip() and "\u2550\u2550" not in p]
    entries: list[tuple[str, list[str]]] = []
    prose: list[str] = []
    for raw in paragraphs:
        paragraph = re.sub(r"\{([^{}]+)\}", r"\1", tidy(raw))
        if match := re.match(r"^:(.+?):(?= |$)(.*)", paragraph):
            entries.append((match[1].strip(), [f"{match[1].strip()}: {match[2].strip()}"]))
        elif len(paragraph) < 45 and not re.search(r"[.!?:)\u201d]$", paragraph):
            continue  # the tables of contents repeat every entry's name as a paragraph of its own
        elif entries and not re.match(r"^ {0,3}(Appendix|Chapter) ", raw):
            entries[-1][1].append(paragraph)
        else:
            prose.append(paragraph)
    yield from pack("jargon", "introduction", prose)
    whole = [(term, "\n\n".join(body), "\n\n".join(body[1:]) or body[0]) for term, body in entries]
    yield from pack_entries("jargon", [entry for entry in whole if len(entry[1]) < 20_000])


def load_devil(root: Path) -> Iterator[Document]:
    text = gzip.decompress((root / "dict-devil/usr/share/dictd/devil.dict.dz").read_bytes()).decode("latin-1")
    entries: list[tuple[str, str, str]] = []
    for raw in re.split(r"\n\s*\n(?=[A-Z][A-Z' -]+,? )", text)[1:]:
        blocks = []
        for block in re.split(r"\n\s*\n", raw.strip()):
            block = re.sub(r"[{}]", "", block)
            verse = block.startswith("  ")
            blocks.append("\n".join(tidy(line) for line in block.splitlines()) if verse else tidy(block))
        if match := re.match(r"^([A-Z][A-Z' -]+)", blocks[0]):
            entry = "\n\n".join(blocks)
            entries.append((match[1].strip().lower(), entry, entry))
    yield from pack_entries("devil", entries)


KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def load_wordnet(root: Path) -> Iterator[Document]:
    """Definitions that come with an example sentence: the readable third of WordNet."""
    for part in ("noun", "verb", "adj", "adv"):
        entries = []
        for line in (root / f"wordnet-base/usr/share/wordnet/data.{part}").read_text("latin-1").splitlines():
            if line.startswith("  ") or '"' not in line:
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split(" ")
            words = [
                re.sub(r"\(.*\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            ]
            gloss = tidy(gloss)
            also = f" (also {', '.join(words[1:4])})" if len(words) > 1 else ""
            definition, _, examples = gloss.partition('; "')
            body = f"{definition}." + (f' For example: "{examples}' if examples else "")
            body = body if body.endswith((".", "!", "?")) else body + "."
            entries.append((words[0], f"{words[0]} ({KINDS[fields[2]]}){also}: {body}", body[:1].upper() + body[1:]))
        yield from pack_entries("wordnet", entries, chars=4_000)


# ---- novels and other plain prose --------------------------------------------------------------------------------


def r_strings(data: bytes) -> list[str]:
    """Character vector of one R serialisation (XDR, version 3): skip the header, then read the CHARSXPs."""
    position = data.index(b"\x00\x00\x00\x10", 20) + 8
    strings = []
    while position + 8 <= len(data) and data[position + 3] == 9:
        size = struct.unpack_from(">i", data, position + 4)[0]
        strings.append(data[position + 8 : position + 8 + max(size, 0)].decode("utf-8", "replace"))
        position += 8 + max(size, 0)
    return strings


def load_austen(root: Path) -> Iterator[Document]:
    data = (root / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    position = 0
    while position < len(data):
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(data[position + 4 :]))
        position = len(data) - len(stream.unused_data)
        paragraphs = [tidy(p).replace("_", "") for p in re.split(r"\n\s*\n", "\n".join(lines))]
        yield from pack("austen", tidy(lines[0]).title(), [p for p in paragraphs if p])


def load_dhammapada(root: Path) -> Iterator[Document]:
    text = (root / "display-dhammapada/usr/share/display-dhammapada/dhammapada-english-transl.txt").read_text("latin-1")
    body = text[text.index("The Dhammapada is an anthology") :]
    yield from pack("dhammapada", "The Dhammapada", [tidy(p) for p in re.split(r"\n\s*\n", body) if p.strip()])


def load_state(root: Path) -> Iterator[Document]:
    for name in ("us-declaration", "us-constitution"):
        text = gzip.decompress((root / f"miscfiles/usr/share/state/{name}.gz").read_bytes()).decode("latin-1")
        yield from pack("state", name, [tidy(p) for p in re.split(r"\n\s*\n", text) if p.strip()])


# ---- manuals -----------------------------------------------------------------------------------------------------


class ProseParser(html.parser.HTMLParser):
    """Collects headings and running paragraphs; code, tables, navigation and scripts are left out."""

    BLOCKS = frozenset(
        [
            "p",
            "li",
            "dd",
            "dt",
            "h1",
            "h2",
            "h3",
            "h4",
            "div",
            "section",
            "ul",
            "ol",
            "dl",
            "blockquote",
            "body",
            "td",
            "tr",
            "table",
            "br",
            "hr",
        ]
    )
    SKIPPED = frozenset(["script", "style", "pre", "nav", "head", "table", "button", "svg", "footer"])

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[tuple[bool, str]] = []  # (is heading, text)
        self.text: list[str] = []
        self.depth = 0
        self.is_heading = False

    def flush(self) -> None:
        text = tidy("".join(self.text)).replace("\u00b6", "")
        if text:
            self.paragraphs.append((self.is_heading, text))
        self.text = []
        self.is_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIPPED:
            self.flush()
            self.depth += 1
        if tag in self.BLOCKS:
            self.flush()
            self.is_heading = tag in ("h1", "h2", "h3")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self.depth = max(0, self.depth - 1)
        elif tag in self.BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if self.depth == 0:
            self.text.append(data)


def html_prose(markup: str) -> list[str]:
    """Sentences of a manual page, each heading kept only when prose follows it."""
    parser = ProseParser()
    parser.feed(markup)
    parser.flush()
    kept: list[str] = []
    heading = ""
    for is_heading, text in parser.paragraphs:
        if is_heading:
            heading = text
        elif len(text) >= 60 and text[-1] in ".:!?)" and sum(c.isalpha() or c == " " for c in text) > 0.85 * len(text):
            if heading and len(heading) < 80:
                kept.append(re.sub(r"^[0-9A-Z]{0,2}[0-9.]+\s+", "", heading))
            heading = ""
            kept.append(text)
    return kept


def load_html(name: str, folder: str, pattern: str, skip: str = r"$^") -> Callable[[Path], Iterator[Document]]:
    def load(root: Path) -> Iterator[Document]:
        seen: set[str] = set()
        for path in sorted((root / folder).rglob(pattern)):
            relative = str(path.relative_to(root / folder))
            if re.search(skip, relative) or path.is_symlink():
                continue
            markup = path.read_text("utf-8", "replace")
            language = re.search(r'<html\b[^>]*\blang="(\w+)', markup)
            if language and language[1] != "en":
                continue
            paragraphs = [p for p in html_prose(markup) if len(p) < 80 or p not in seen]
            seen.update(paragraphs)
            if sum(map(len, paragraphs)) >= 600:
                yield from pack(name, relative, paragraphs)

    return load


def load_perl(root: Path) -> Iterator[Document]:
    for path in sorted((root / "perl-doc").rglob("*.pod")):
        if "delta" in path.name or path.name in ("perltoc.pod", "perlapi.pod", "perldiag.pod", "perluniprops.pod"):
            continue
        text = re.sub(r"(?ms)^=(begin|for)\b.*?^$", "", path.read_text("utf-8", "replace"))
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text):
            if paragraph.startswith((" ", "\t")):
                continue
            paragraph = tidy(re.sub(r"^=(\w+)\s*", "", paragraph))
            for _ in range(3):
                paragraph = re.sub(r"[BCFILSX]<<* ?(?:[^<>|]*\|)?([^<>]*?) ?>+", r"\1", paragraph)
            paragraph = html.unescape(re.sub(r"E<(\w+)>", r"&\1;", paragraph))
            if len(paragraph) >= 60 and sum(c.isalpha() or c == " " for c in paragraph) > 0.85 * len(paragraph):
                paragraphs.append(paragraph)
        if sum(map(len, paragraphs)) >= 600:
            yield from pack("perl", path.name, paragraphs)


COMMENTS = "/usr/share/sword/modules/comments/zcom/"
PY = "python3.11-doc/usr/share/doc/python3.11/html"
RUST = "rust-doc/usr/share/doc/rust-doc/html"

SOURCES = (
    Source("kjv", "bible-kjv-text", "4.38", "public domain (1611/1769 text)", "The Bible, King James Version",
           load_kjv),
    Source("web", "sword-text-web", "426.0-1", "public domain", "World English Bible", load_web),
    Source("tdavid", "sword-comm-tdavid", "2.1-1", "public domain (1885)", "C. H. Spurgeon, The Treasury of David",
           load_commentary("tdavid", "sword-comm-tdavid" + COMMENTS + "tdavid", "cz", "Spurgeon")),
    Source("mhcc", "sword-comm-mhcc", "2.0-1", "public domain", "Matthew Henry's Concise Commentary",
           load_commentary("mhcc", "sword-comm-mhcc" + COMMENTS + "mhcc", "bz", "Matthew Henry")),
    Source("scofield", "sword-comm-scofield", "2.1-1", "public domain (1917)", "Scofield Reference Notes",
           load_commentary("scofield", "sword-comm-scofield" + COMMENTS + "scofield", "bz", "Scofield")),
    Source("austen", "r-cran-janeaustenr", "1.0.0-1", "texts public domain; package MIT", "Jane Austen's six novels",
           load_austen),
    Source("jargon", "jargon-text", "4.4.7-4.1", "public domain", "The Jargon File 4.4.7", load_jargon),
    Source("devil", "dict-devil", "1.0-13.1", "public domain", "Ambrose Bierce, The Devil's Dictionary", load_devil),
    Source("dhammapada", "display-dhammapada", "1.0-0.1+b1", "public domain (dedicated)",
           "The Dhammapada, tr. John Richards", load_dhammapada),
    Source("state", "miscfiles", "1.5+dfsg-4", "public domain (US government works)",
           "US Declaration and Constitution", load_state),
    Source("wordnet", "wordnet-base", "1:3.0-37", "WordNet 3.0 licence (permissive, notice)",
           "WordNet 3.0 definitions with examples", load_wordnet),
    Source("sqlite", "sqlite3-doc", "3.40.1-2+deb12u2", "public domain", "SQLite documentation",
           load_html("sqlite", "sqlite3-doc/usr/share/doc/sqlite3", "*.html",
                     r"releaselog|^changes|session/|syntax/|^(doc_|keyword|sitemap)")),
    Source("postgresql", "postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL licence (permissive)",
           "PostgreSQL 15 documentation",
           load_html("postgresql", "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html", "*.html",
                     r"^release|bookindex|^biblio")),
    Source("python", "python3.11-doc", "3.11.2-6+deb12u9", "PSF licence v2 (permissive)", "Python 3.11 documentation",
           load_html("python", PY, "*.html",
                     r"genindex|^_|search|whatsnew/changelog|license|py-modindex")),
    Source("rust", "rust-doc", "1.63.0+dfsg1-2", "MIT or Apache-2.0",
           "The Rust books (book, reference, nomicon, by example, editions, embedded)",
           load_html("rust", RUST, "*.html",
                     r"^(?!(book|reference|nomicon|rust-by-example|edition-guide|embedded-book)/)"
                     r"|print\.html|2018-edition|first-edition|second-edition")),
    Source("apache", "apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0", "Apache HTTP Server 2.4 documentation, English",
           load_html("apache", "apache2-doc/usr/share/doc/apache2-doc/manual/en", "*.html")),
    Source("perl", "perl-doc", "5.36.0-7+deb12u4", "Artistic or GPL-1+", "Perl 5.36 manual pages", load_perl),
)  # fmt: skip


def fetch(scratch: Path) -> Path:
    """Download the packages with apt-get and unpack them (nothing is installed). Returns the folder they lie in."""
    debs, root = scratch / "deb", scratch / "root"
    debs.mkdir(parents=True, exist_ok=True)
    packages = [source.package for source in SOURCES] + ["bible-kjv"]
    missing = [package for package in packages if not (root / package).exists()]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=debs, check=True)
        for package in missing:
            deb = next(debs.glob(f"{package}_*.deb"))
            (root / package).mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg", "-x", deb, root / package], check=True)
    return root
