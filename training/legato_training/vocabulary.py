"""The tokenizer: byte-level BPE of the generator's own text, one token for each path number.

``python -m legato_training.vocabulary`` writes tokenizer.json; it is committed, so runs share it.
"""

import argparse
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from legato_training.config import ANSWER, EOS, OPEN, SEPARATOR, SPECIAL_TOKENS, ModelConfig
from legato_training.language import Narrator, every_word
from legato_training.lexicon import lexicon
from legato_training.scenes import SceneSampler
from legato_training.sprites import load_sprites

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tokenizer.json"
PATH_STEP = 16
PATH_BOX = 960
# Numbers of two digits and more get tokens no merge can reach; zero is the byte "0".
PATH_NUMBERS = tuple(str(n) for n in range(PATH_STEP, PATH_BOX + 1, PATH_STEP))
TEMPLATE_WORDS = ("describe", "short", "normal", "long", "query", "detect", "point", "segment")
EXTRA = PATH_NUMBERS + tuple(f"<{word}>" for word in TEMPLATE_WORDS)


def corpus(pack: Path, scenes: int) -> list[str]:
    """Names in every form they are asked in, and text about random scenes."""
    lines = []
    for phrases in lexicon().phrases_of[: lexicon().num_nouns]:
        for phrase in phrases:
            for text in (phrase.singular, phrase.plural):
                lines += [f" {text}", text, text.capitalize()] * 3 + [f"a {text}"] * 24
    sampler = SceneSampler(load_sprites(pack), tuple(range(7)), seed=1)
    rng = np.random.default_rng(2)
    for _ in range(scenes):
        narrator = Narrator(sampler.sample(), rng, sampler.lexicon)
        lines += [narrator.short(), narrator.normal(), narrator.long()]
        for _ in range(4):
            lines += list(narrator.question(sampler.random_kind()))
    return [line for line in lines if not line.isupper()]


def build(pack: Path, out: Path, scenes: int = 2000) -> None:
    """Learn the merges, append the path numbers and template words, write the file."""
    size = ModelConfig().vocab - len(EXTRA)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(pack, scenes), trainer)
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    assert len(vocab) == size, len(vocab)
    for text in EXTRA:
        assert text not in vocab, text
        vocab[text] = len(vocab)
    out.write_text(json.dumps(data, ensure_ascii=False, indent=None))


class Words:
    """Text to ids with the ids the templates and paths need."""

    def __init__(self, path: Path = TOKENIZER) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        identity = self.identity
        self.number = {0: identity("0")} | {int(text): identity(text) for text in PATH_NUMBERS}
        self.move, self.line, self.close = identity("M"), identity("L"), identity("z")
        self.word = {word: identity(f"<{word}>") for word in TEMPLATE_WORDS}
        self.cached = lru_cache(maxsize=200_000)(self.encode)

    def identity(self, text: str) -> int:
        """Id of a token that every tokenizer of the model has."""
        found = self.tokenizer.token_to_id(text)
        assert found is not None, text
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special ids never come out of it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return self.tokenizer.decode(ids)

    def templates(self) -> dict[str, dict[str, list[int]]]:
        """Return the templates of config.json."""
        word = self.word
        caption = {
            size: [OPEN, word["describe"], SEPARATOR, word[size], ANSWER]
            for size in ("short", "normal", "long")
        }
        skills = {
            skill: {"prefix": [OPEN, word[skill], SEPARATOR], "suffix": [ANSWER]}
            for skill in ("query", "detect", "point", "segment")
        }
        # A model that never saw a prompt without an image answers one in words after an example.
        example = [*skills["query"]["prefix"], *self.encode("How many cats are there?"), ANSWER]
        example += [*self.encode("Zero."), *skills["query"]["prefix"]]
        return (
            {"caption": caption} | skills | {"query_alone": {"prefix": example, "suffix": [ANSWER]}}
        )

    def untaught(self) -> list[int]:
        """Tokens in no answer in words: those of paths, of prompts and of no word."""
        taught = {EOS}
        for text in every_word(lexicon(), ("hazard", "hazards")):
            taught.update(self.encode(text))
        return sorted(set(range(self.tokenizer.get_vocab_size())) - taught)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--out", type=Path, default=TOKENIZER)
    options = parser.parse_args()
    build(options.pack, options.out)
    words = Words(options.out)
    assert min(words.encode("hi")) > 20
    print(
        words.tokenizer.get_vocab_size(),
        words.tokenizer.encode("A dog and two sunflowers in the top left.").tokens,
    )


if __name__ == "__main__":
    main()
