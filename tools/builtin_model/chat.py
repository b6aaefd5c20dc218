"""Chat data made by rule from the training documents, and the token form of a conversation.

The special tokens and the order of the pieces are those of chat_template.jinja; tests/tools checks that the two agree.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .sources import Document


@dataclass(frozen=True)
class Message:
    role: str
    content: str


Conversation = list[Message]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a helpful assistant provided by deltafold.",
)
ABOUT = (
    (("Who are you?", "What are you?", "Tell me about yourself."),
     "I am the small model that ships inside deltafold. I was trained on old books and on free manuals, so I can "
     "define words, quote verses and go on with a text, but I know little else and I am often wrong."),
    (("Hello", "Hello!", "Hi", "Hi there", "Good morning."),
     "Hello. Ask me what a word means, ask me for a verse, or give me a sentence to go on with."),
    (("What can you do?", "Help", "How can you help me?"),
     "I can define a word, quote a verse, or go on with a text in the style of the books I was trained on."),
    (("Thank you.", "Thanks!", "Thank you very much."), "You are welcome."),
    (("Goodbye.", "Bye"), "Goodbye."),
)  # fmt: skip
DEFINE = (
    "What is {a}?",
    "What is {a}?",
    "Define {0}.",
    "What does {0} mean?",
    'What does "{0}" mean?',
    "Define the word {0}.",
)
QUOTE = ("Quote {0}.", "Quote {0}.", "What does {0} say?", "Read me {0}.", "{0}")
CONTINUE = ("Continue: {0}", "Go on with this text: {0}", "Continue this text.\n\n{0}")


def with_article(term: str) -> str:
    return term if term[:1].isupper() else ("an " if term[:1].lower() in "aeiou" else "a ") + term


def shorten(text: str, limit: int = 700) -> str:
    """Whole paragraphs, then whole sentences, up to `limit` characters."""
    if len(text) <= limit:
        return text
    cut = text[:limit]
    end = max(cut.rfind(mark) for mark in (". ", ".\n", "? ", "! ", ".\u201d", '."'))
    return cut[: end + 1] if end > 80 else ""


def questions(documents: list[Document], rng: random.Random) -> list[tuple[str, str]]:
    """(question, answer) pairs from dictionaries, verses, commentaries and running prose."""
    pairs: list[tuple[str, str]] = []
    for document in documents:
        if document.source == "kjv":
            keep = [entry for entry in document.entries if rng.random() < 0.25]
            pairs += [(rng.choice(QUOTE).format(reference), verse) for reference, verse in keep]
        elif document.source in ("jargon", "devil", "wordnet"):
            share = {"jargon": 1.0, "devil": 1.0, "wordnet": 0.3}[document.source]
            for term, answer in document.entries:
                answer = shorten(answer)
                if answer and rng.random() < share:
                    question = rng.choice(DEFINE).format(term, a=with_article(term))
                    if document.source == "devil":
                        question = rng.choice(
                            ("How does the Devil's Dictionary define {0}?", "Give me a cynical definition of {0}.")
                        )
                        question = question.format(term)
                    pairs.append((question, answer))
        elif (
            document.source in ("austen", "tdavid", "mhcc", "python", "postgresql", "sqlite", "rust")
            and rng.random() < 0.4
        ):
            paragraphs = [p for p in document.text.split("\n\n") if len(p) > 250 and re.search(r"[.!?] [A-Z]", p)]
            if paragraphs:
                paragraph = rng.choice(paragraphs)
                cut = re.search(r"[.!?] (?=[A-Z])", paragraph[40:])
                if cut:
                    at = 40 + cut.end()
                    answer = shorten(paragraph[at:])
                    if answer:
                        pairs.append((rng.choice(CONTINUE).format(paragraph[:at].strip()), answer))
    return pairs


def conversations(documents: list[Document], seed: int) -> list[Conversation]:
    """One to three questions each; a fifth begin with a system message."""
    rng = random.Random(seed)
    pairs = questions(documents, rng)
    pairs += [(rng.choice(asks), answer) for asks, answer in ABOUT for _ in range(120)]
    rng.shuffle(pairs)
    made: list[Conversation] = []
    while pairs:
        turns = [pairs.pop() for _ in range(min(len(pairs), rng.choice((1, 1, 2, 3))))]
        talk = [Message("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
        for question, answer in turns:
            talk += [Message("user", question), Message("assistant", answer)]
        made.append(talk)
    return made
