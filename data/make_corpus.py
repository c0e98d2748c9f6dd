"""Write data/dummy.txt, the shipped corpus: one chapter about building a GPT-2, in 168 variants.

The text has 290,599 bytes and 52,600 word-level tokens, 172 of them distinct. It contains nothing random, so `--check`
can compare the bytes on every machine and with every Python version. The number of a chapter determines its year, its
season and its topic:

    chapter = 28 * year + 7 * season + topic            168 chapters = 6 years x 4 seasons x 7 topics

A chapter is one line of 313 tokens. Its topic determines the order of its three parts A, B and C (MOVEMENTS). A refrain
after each part names the year, the season and the topic again, at most 105 tokens after they were named the last time.
So a window of 256 tokens determines the next token, and a model can learn the whole corpus.

If you change the text, keep three properties:

- The refrain occurs three times in a chapter. Then a model learns one part of the text early and another part late.
  Without the repetition the loss stays at the entropy of single words for a long time and then falls abruptly.
- The length of a chapter, 313 tokens, is odd. Every window of 256 tokens starts at a multiple of 8 = gcd(256, 52600).
  If the length were a multiple of 8, each sentence would have the same position modulo 8 in all windows.
- The number of topics is odd. The position of a chapter in its window determines the chapter's number modulo 8. With
  six topics this position would determine whether the number of the topic is even, so a model need not read the topic.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # so that it also runs without installation

from gpt2core.app.command import run_command
from gpt2core.app.settings.flag_parser import Parser, to_path
from gpt2core.communicator import Solo

CORPUS = Path(__file__).resolve().parent / "dummy.txt"

YEARS = "first second third fourth fifth sixth".split()
SEASONS = "spring summer autumn winter".split()
TOPICS = {  # topic: the order of the three parts in its chapters
    "tokenizer": "ABC",
    "loader": "BCA",
    "kernel": "CAB",
    "optimizer": "ACB",
    "sampler": "CBA",
    "scheduler": "BAC",
    "profiler": "ABC",
}

# Chapters with numbers from HANDOVER on use the second name, which is one letter shorter. A chapter contains the name
# three times, so HANDOVER determines the exact size of the file.
NAMES, HANDOVER = ("Grace", "Alan"), 71

OPENING = (
    "In the {season} of the {year} year, {name} opened a notebook and decided to rebuild the {topic} with paper, "
    "patience and coffee."
)
MOVEMENTS = {
    "A": (
        "Every token borrowed a vector from the embedding table and remembered its path.",
        "Attention heads asked earlier words silent questions, while a triangular mask kept the future hidden.",
        "Between blocks, a residual stream carried messages forward, and normalization kept the numbers calm.",
        "The numbers flowed through a softmax, and the scores turned into honest probabilities.",
    ),
    "B": (
        "The loss measured every surprise, and the gradients swam upstream like salmon through each earlier operation.",
        "Momentum smoothed their path, and the optimizer took careful steps down a steep mountain.",
        "Some evenings the loss curve bent down; other evenings it exploded, because somebody had transposed a matrix.",
        "Nobody smiled until the last two digits agreed.",
    ),
    "C": (
        "Four machines shared the work around a table, and passed partial sums forward until the last machine agreed.",
        "Graphics processors finished in seconds, and the answers matched the serial program to the last digit.",
        "Every evening a checkpoint defended our progress against thunder, power failures, and cats.",
        "The cats asked no questions and kept silent.",
    ),
}
REFRAIN = "That {year} {season} the loss wandered downward, step after step, and the {topic} continued counting."
INTERLUDE = (
    "{name} drank lukewarm coffee, counted the indices on napkins, and blamed the {topic} until the compiler confessed."
)
CLOSING = (
    "By the end of the {year} {season}, the {topic} worked, {name} smiled, and the model recited its corpus from "
    "memory."
)
EPILOGUE = MOVEMENTS["B"][1]


def chapter(number):
    """Return chapter `number` (from 0) as one line without a newline."""
    topic, order = list(TOPICS.items())[number % 7]
    first, second, third = (MOVEMENTS[letter] for letter in order)
    words = {"year": YEARS[number // 28], "season": SEASONS[number // 7 % 4], "topic": topic}
    sentences = [OPENING, *first, REFRAIN, INTERLUDE, *second, REFRAIN, *third, REFRAIN, CLOSING]
    return " ".join(sentences).format(**words, name=NAMES[number >= HANDOVER])


def corpus():
    """Return the whole text, in ASCII: all chapters, and one more sentence, so that it has exactly 52,600 tokens.

    It ends with a newline, because a window at the end of the text continues at its start.
    """
    chapters = [chapter(number) for number in range(len(YEARS) * len(SEASONS) * len(TOPICS))]
    return "\n".join(chapters) + f" {EPILOGUE}\n"


def main(arguments=None):
    """Write the corpus, or compare the file with it (--check). Returns 1 if --check finds a difference, else 0."""
    parser = Parser("Write data/dummy.txt, the shipped corpus, byte for byte.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file differs")
    text = "the file to write or check (default data/dummy.txt)"
    parser.add_argument("--out", type=to_path, default=CORPUS, help=text)
    options = parser.parse_args(arguments)
    wanted = corpus().encode("ascii")
    if not options.check:
        options.out.write_bytes(wanted)
        print(f"wrote {len(wanted):,} bytes to {options.out}")
        return 0
    if not options.out.is_file() or options.out.read_bytes() != wanted:
        print(f"{options.out} is not what make_corpus.py writes: run python data/make_corpus.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command(Solo, lambda world: main())
