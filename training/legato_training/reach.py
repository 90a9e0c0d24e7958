"""How close is close: ``python -m legato_training.reach --fit FOLDER --test FOLDER --out FILE``.

An object's score holds the probability of the bins near the chosen ones. This asks the exported
model about two labelled folders, by torch and with the questions of `legato calibrate`, computes
the score with many reaches at once, chooses one by the folder of the fit, and judges it on the
other. The reaches that Legato has are `PRESENT`.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from legato_client import Box, Point
from legato_client.calibration.fit import calibration_error, fit, log_loss
from legato_client.calibration.scored import ANNOTATIONS, LabelledImage, read_labels, right_places
from PIL import Image
from torch import Tensor

from legato_training.config import COORD, EOS
from legato_training.decode import Answer, Decoder
from legato_training.evaluate import MAX_ANSWERED
from legato_training.export import load_exported
from legato_training.vocabulary import ROOT, Words

PLACES = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 2.0)  # of the side; the last one is all
OCTAVES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 20.0)
PRESENT = (2, 2)  # 1/32, half an octave
SIZE_OCTAVES = 10
TOKENS = {"detect": 3, "point": 2}
RESAMPLES = 400
BATCH = 256


class SureDecoder(Decoder):
    """Keeps existence [B] and concentrations [B, reach] of each step of `answer`."""

    def begin(self, skill: str) -> None:
        """Forget the steps before."""
        self.tokens_per_object = TOKENS[skill]
        self.exists: list[Tensor] = []
        self.near: list[Tensor] = []

    def next_values(self, hidden_BD: Tensor, chosen_B: Tensor) -> Tensor:
        """As for every decoder."""
        may_end = len(self.exists) % self.tokens_per_object == 0
        logits = self.model.token_logits(hidden_BD).float()
        chosen = logits.gather(-1, chosen_B[:, None])[:, 0]
        exists = torch.sigmoid(chosen - logits[:, EOS])
        self.exists.append(exists if may_end else torch.ones_like(exists))
        region, bins = self.model.region, self.model.config.bins
        coord = masses(region.coord_decoder(hidden_BD)[:, None], [r * bins for r in PLACES])
        octave = (bins - 1) / SIZE_OCTAVES
        sizes = region.size_decoder(hidden_BD).unflatten(-1, (2, bins))
        size = masses(sizes, [r * octave for r in OCTAVES])
        self.near.append(torch.where((chosen_B == COORD)[:, None], coord, size))
        return super().next_values(hidden_BD, chosen_B)


def masses(logits_BHN: Tensor, reaches: list[float]) -> Tensor:
    """[B, reach] probability near the likeliest bin, the product over H heads."""
    chance = logits_BHN.double().softmax(-1)
    bins = torch.arange(chance.shape[-1], device=chance.device)
    apart = (bins - chance.argmax(-1, keepdim=True)).abs()
    near = [torch.where(apart <= round(reach), chance, 0.0).sum(-1).prod(-1) for reach in reaches]
    return torch.stack(near, -1).float()


@dataclasses.dataclass(frozen=True)
class Question:
    """An answer with its truth; `exists` [tokens] and `near` [tokens, reach] of its objects."""

    picture: LabelledImage
    name: str
    places: list[Box | Point]
    exists: np.ndarray
    near: np.ndarray

    def scores(self, place: int, octave: int) -> list[float]:
        """Of each object, with two of the reaches."""
        count = len(self.places)
        if not count:
            return []
        near = self.near.reshape(count, -1, len(PLACES))
        product = self.exists.reshape(count, -1).prod(-1) * near[:, :2, place].prod(-1)
        if near.shape[1] > 2:
            product = product * near[:, 2, octave]
        scores: list[float] = product.tolist()
        return scores


@torch.no_grad()
def ask(
    decoder: SureDecoder, pictures: list[LabelledImage], skill: str, device: str
) -> Iterator[Question]:
    """Every picture about all of its names."""
    words = Words()
    before, after = words.templates()[skill]["prefix"], words.templates()[skill]["suffix"]
    asked = [(picture, name) for picture in pictures for name in picture.boxes]
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        pixels = torch.stack([tensor(picture.path) for picture, _ in batch]).to(device)
        prompts = [[*before, *words.encode(f" {name}"), *after] for _, name in batch]
        decoder.begin(skill)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            limit = TOKENS[skill] * MAX_ANSWERED + 1
            answers = decoder.answer(decoder.read(pixels), prompts, skill, limit)
        exists, near = (
            torch.stack(each, 1).cpu().numpy() for each in (decoder.exists, decoder.near)
        )
        for row, ((picture, name), answer) in enumerate(zip(batch, answers, strict=True)):
            found = places(answer, skill)
            used = len(found) * TOKENS[skill]
            yield Question(picture, name, found, exists[row, :used], near[row, :used])


def tensor(path: Path) -> Tensor:
    """-1..1 [3, Y, X]."""
    pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy())
    return pixels.permute(2, 0, 1).float() / 127.5 - 1


def places(answer: Answer, skill: str) -> list[Box | Point]:
    """Return the boxes or points of an answer."""
    if skill == "point":
        return [Point(x, y) for x, y in answer.points()]
    return [Box(*(min(max(v, 0.0), 1.0) for v in box)) for box in answer.boxes()]


def pairs_of(questions: list[Question], place: int, octave: int) -> list[list[tuple[float, bool]]]:
    """Scores and whether they are right, by picture."""
    by_picture: dict[int, list[tuple[float, bool]]] = {}
    for each in questions:
        scores = each.scores(place, octave)
        rights = right_places(each.places, scores, each.picture.boxes[each.name])
        pairs = zip(scores, rights, strict=True)
        by_picture.setdefault(each.picture.number, []).extend(pairs)
    return list(by_picture.values())


def average_precision(pairs: list[tuple[float, bool]], wanted: int) -> float:
    """Of all names together; a right box has IoU 0.5."""
    right = np.array([is_right for _, is_right in sorted(pairs, reverse=True)], float)
    precision = right.cumsum() / (np.arange(len(right)) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best * right).sum() / wanted)


def figures(
    questions: list[Question], fitting: list[Question], reach: tuple[int, int]
) -> dict[str, float]:
    """Of one reach: AP, and the errors after the fit on `fitting`."""
    fitted = fit([pair for some in pairs_of(fitting, *reach) for pair in some])
    pairs = [pair for some in pairs_of(questions, *reach) for pair in some]
    wanted = sum(len(each.picture.boxes[each.name]) for each in questions)
    return {
        "ap": average_precision(pairs, wanted),
        "ece": calibration_error(fitted, pairs),
        "log_loss": log_loss(fitted, pairs),
    }


def gain(
    questions: list[Question], fitting: list[Question], reach: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Of one reach against the present one: differences and their errors, over pictures."""
    rng = np.random.default_rng(0)
    both = [pairs_of(questions, *each) for each in (PRESENT, reach)]
    fits = [
        fit([p for some in pairs_of(fitting, *each) for p in some]) for each in (PRESENT, reach)
    ]
    wanted = sum(len(each.picture.boxes[each.name]) for each in questions)
    taken = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(both[0]), size=len(both[0]))
        measured = []
        for by_picture, fitted in zip(both, fits, strict=True):
            pairs = [pair for index in drawn for pair in by_picture[index]]
            measured.append(
                (
                    average_precision(pairs, wanted),
                    calibration_error(fitted, pairs),
                    log_loss(fitted, pairs),
                )
            )
        taken.append(np.subtract(measured[1], measured[0]))
    names = ("ap", "ece", "log_loss")
    return {
        name: {"mean": float(column.mean()), "error": float(column.std(ddof=1))}
        for name, column in zip(names, np.array(taken).T, strict=True)
    }


def study(fitting: list[Question], testing: list[Question], skill: str) -> dict[str, Any]:
    """All reaches on the fit's folder; the best one and the present one on the other."""
    octaves = range(len(OCTAVES)) if TOKENS[skill] == 3 else (PRESENT[1],)
    reaches = list(itertools.product(range(len(PLACES)), octaves))
    table = [
        {"place": PLACES[p], "octaves": OCTAVES[o]} | figures(fitting, fitting, (p, o))
        for p, o in reaches
    ]
    best = reaches[min(range(len(reaches)), key=lambda index: table[index]["log_loss"])]
    existence = (len(PLACES) - 1, len(OCTAVES) - 1)  # all bins are close
    return {
        "fit": table,
        "best": {"place": PLACES[best[0]], "octaves": OCTAVES[best[1]]},
        "held_out": {
            "present": figures(testing, fitting, PRESENT),
            "best": figures(testing, fitting, best),
            "best_against_present": gain(testing, fitting, best),
            "existence_alone": figures(testing, fitting, existence),
            "existence_against_present": gain(testing, fitting, existence),
        },
    }


def keep(path: Path, questions: dict[tuple[str, str], list[Question]]) -> None:
    """Answers by set and skill as JSON lines, compressed."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for (name, skill), some in questions.items():
            for each in some:
                line = {
                    "set": name,
                    "skill": skill,
                    "picture": each.picture.number,
                    "name": each.name,
                    "places": [list(dataclasses.astuple(place)) for place in each.places],
                    "exists": each.exists.tolist(),
                    "near": each.near.tolist(),
                }
                file.write(json.dumps(line) + "\n")


def kept(
    path: Path, folders: dict[str, list[LabelledImage]]
) -> dict[tuple[str, str], list[Question]]:
    """Read what `keep` wrote."""
    pictures = {(name, each.number): each for name, all_ in folders.items() for each in all_}
    questions: dict[tuple[str, str], list[Question]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            shape = Box if line["skill"] == "detect" else Point
            question = Question(
                picture=pictures[line["set"], line["picture"]],
                name=line["name"],
                places=[shape(*place) for place in line["places"]],
                exists=np.array(line["exists"]),
                near=np.array(line["near"]).reshape(-1, len(PLACES)),
            )
            questions.setdefault((line["set"], line["skill"]), []).append(question)
    return questions


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", type=Path, required=True, help="made by labelled.py")
    parser.add_argument("--test", type=Path, required=True, help="made by labelled.py, other seed")
    parser.add_argument("--model", type=Path, default=ROOT.parent / "engine/tiny/legato_tiny")
    parser.add_argument("--absent", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=Path, required=True, help="kept there, read if there")
    parser.add_argument("--out", type=Path, help="the study, else the model is only asked")
    args = parser.parse_args()
    folders = {
        name: read_labels(folder, folder / ANNOTATIONS, absent=args.absent)
        for name, folder in (("fit", args.fit), ("test", args.test))
    }
    if not args.answers.exists():
        decoder = SureDecoder(load_exported(args.model).to(args.device))
        questions = {
            (name, skill): list(ask(decoder, pictures, skill, args.device))
            for name, pictures in folders.items()
            for skill in TOKENS
        }
        keep(args.answers, questions)
    if args.out:
        questions = kept(args.answers, folders)
        document = {
            skill: study(questions["fit", skill], questions["test", skill], skill)
            for skill in TOKENS
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")
        for skill, each in document.items():
            print(skill, json.dumps({k: v for k, v in each.items() if k != "fit"}))


if __name__ == "__main__":
    main()
