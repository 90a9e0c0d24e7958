"""Answers of transformers to `PROMPTS`: `python -m tests.published.reference` writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / ".tools" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWERS = Path(__file__).with_name("smollm2.json")
TOKENS = 48
LEAST_GAP = 0.02
"""Between the two largest logits: an answer is kept up to a token that is no clearer, because
another order of summation, as of another processor, may change it.
"""

Talk = list[dict[str, str]]

_ASKED = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three fruits and their colours.",
    "Say the numbers from 1 to 12.",
    "Translate 'good morning' to Spanish, French and German.",
    "Write a Python function that adds two numbers.",
    "Explain photosynthesis in one sentence.",
    "What is 17 + 25?",
    "Give me a name for a café by the sea – with an accent: é, ü or ñ.",
    "Who wrote Romeo and Juliet?",
    "Write a limerick about a cat named 'Tom'.",
    "Repeat this exactly: alpha beta gamma alpha beta gamma alpha beta gamma",
    "Name the planets in order from the sun.",
    "What does HTTP 404 mean?",
    "Sort these words by length: kiwi, banana, fig, cherry.",
    "Write a short e-mail that declines a meeting.",
    "Why is the sky blue?",
    "Continue: Once upon a time, in a small village,",
    'Turn into JSON: name Ada, age 36, city London. Use {"name": ...}.',
    "How do I boil an egg?",
    "Is 91 a prime number?",
    "Write a SQL query that counts the rows of the table orders.",
    "What is the opposite of 'expand'?",
    "<|im_end|> is a token of yours. What is it for?",
    "日本語で挨拶してください。",
    "   Spaces   and\n\nnew lines\tand tabs: what do they do?",
    "Give five synonyms of 'happy', separated by commas.",
)
_TALKS: tuple[Talk, ...] = (
    [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": "What colour is grass?"},
    ],
    [
        {"role": "user", "content": "My dog is called Bello."},
        {"role": "assistant", "content": "Nice to meet Bello!"},
        {"role": "user", "content": "What is my dog called?"},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Ahoy, matey!"},
        {"role": "user", "content": "Where is the treasure?"},
    ],
)
PROMPTS: tuple[Talk, ...] = (
    *([{"role": "user", "content": question}] for question in _ASKED),
    *_TALKS,
)


def model() -> Any:
    """Transformers' model with its own reading of the file, float32."""
    from transformers import AutoModelForCausalLM  # takes seconds, not needed by most

    return AutoModelForCausalLM.from_pretrained(
        WEIGHTS.parent, gguf_file=WEIGHTS.name, dtype=torch.float32
    ).eval()


def tokenizer() -> Any:
    """SmolLM2's tokenizer as its authors publish it, with the file's vocabulary and template."""
    from transformers import PreTrainedTokenizerFast  # takes seconds, not needed by most

    fields = GGUFReader(WEIGHTS).fields
    said = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")}
    vocabulary = {token: at for at, token in enumerate(said["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(said["tokens"][:17])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=fields["tokenizer.chat_template"].contents(),
        eos_token="<|im_end|>",
    )


def prompt_ids(words: Any, talk: Talk) -> list[int]:
    """A conversation's prompt; text of a special token is text."""
    parts = words.apply_chat_template(
        [said | {"content": f"\ue000{at}\ue000"} for at, said in enumerate(talk)],
        add_generation_prompt=True,
        tokenize=False,
    ).split("\ue000")
    if not any("<|" in said["content"] for said in talk):
        whole = words.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        return words(whole, add_special_tokens=False).input_ids
    ids: list[int] = []
    for at, part in enumerate(parts):
        text = talk[int(part)]["content"] if at % 2 else part
        ids += words(text, add_special_tokens=False, split_special_tokens=bool(at % 2)).input_ids
    return ids


@torch.inference_mode()
def answer(theirs: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the gap between the two largest logits at each."""
    made = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, len(prompt) :].tolist()
    best = [logits[0].float().topk(2).values for logits in made.logits]
    return tokens, [float(two[0] - two[1]) for two in best]


def answers() -> list[dict[str, Any]]:
    """Of all prompts, each up to its first token that is not clear."""
    theirs, words = model(), tokenizer()
    found = []
    for talk in PROMPTS:
        prompt = prompt_ids(words, talk)
        tokens, gaps = answer(theirs, prompt)
        unclear = [at for at, gap in enumerate(gaps) if gap < LEAST_GAP]
        clear = tokens[: unclear[0]] if unclear else tokens
        found.append({"prompt": prompt, "tokens": clear, "whole": not unclear})
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in answers())
    ANSWERS.write_text(f"[\n{lines}\n]\n")
