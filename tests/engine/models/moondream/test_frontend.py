"""Requests to tasks: prompts, tokens, tilings, defaults and refusals."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import InvalidField, PromptTooLong, TaskUnsupported
from legato_engine.kernels.images import CutPlan
from legato_engine.models.moondream.frontend import MoondreamFrontend, Prompts
from legato_engine.models.moondream.preprocess import (
    CroppedImage,
    WholeImage,
    crop_geometry,
    crop_image,
    select_tiling,
    whole_image,
)
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_config,
    tiny_random_config,
)
from legato_engine.models.moondream.tokenizer import (
    NUM_SPECIAL,
    BytePairTokenizer,
    StandInTokenizer,
)
from legato_engine.types import (
    SKILLS,
    BlobRef,
    CaptionLength,
    CaptionSpec,
    DetectSpec,
    EncodedImage,
    ImageBox,
    ImagePoint,
    ImageProperties,
    PointSpec,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
    Turn,
)
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IMAGE = EncodedImage(blob=BlobRef(name="b", size=1), mime_type="image/png")
SPECS = [
    QuerySpec(question="why"),
    CaptionSpec(),
    DetectSpec(object="cup"),
    PointSpec(object="cup"),
    SegmentSpec(object="cup"),
]

KEY = RequestKey("r")


def request(task, image=IMAGE, key=KEY, **sampling):
    """A request for a task."""
    return Request(
        request_id=key,
        task=task,
        image=image,
        sampling=SamplingParams(**sampling),
    )


def field_of(frontend, bad):
    """The field that the refusal names."""
    with pytest.raises(InvalidField) as caught:
        frontend.make_task(bad)
    return caught.value.metadata["field"]


@pytest.mark.parametrize(
    "task", [*SPECS[1:], QuerySpec(question="?", spatial_refs=(ImagePoint(x=0, y=0),))]
)
def test_spatial_skills_and_captions_need_an_image(frontend, task):
    """The error names the image."""
    assert field_of(frontend, request(task, image=None)) == "image"


def test_a_conversation_needs_the_image_that_it_shows(frontend):
    """A message that shows an image needs one; a conversation alone does not."""
    turn = Turn(question="a", answer="b")
    assert field_of(frontend, request(QuerySpec(question="?", shows_image=True), None)) == "image"
    chat = frontend.make_task(request(QuerySpec(question="?", history=(turn,)), None))
    alone = frontend.make_task(request(QuerySpec(question="?"), None))
    assert len(chat.prompt) == 2 * len(alone.prompt) + 1
    assert chat.max_tokens == alone.max_tokens - len(alone.prompt) - 1


def test_a_question_needs_no_image(frontend):
    """A query without image follows BOS, and may use the positions that an image would take."""
    with_image = frontend.make_task(request(SPECS[0]))
    without = frontend.make_task(request(SPECS[0], image=None))
    assert frontend.prefix_length(False) == 1
    assert without.prompt == with_image.prompt
    assert without.max_tokens - with_image.max_tokens == frontend.prefix_length(True) - 1


@pytest.mark.parametrize("task", SPECS)
def test_sampling_is_resolved(frontend, task):
    """All fields but top_k are set, and requested values stay."""
    sampling = frontend.make_task(request(task)).sampling
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    assert [name for name, value in fields.items() if value is None] == ["top_k"]
    asked = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "max_tokens": 9,
        "seed": 11,
        "stop": ("x",),
    }
    sampling = frontend.make_task(request(task, **asked)).sampling
    assert msgspec.structs.asdict(sampling) == asked


def test_the_seed_follows_the_request_id(frontend):
    """A retried request samples the same through any process, another one differently."""
    ids = (RequestKey("a"), RequestKey("a", worker=3), RequestKey("b"))
    seeds = [frontend.make_task(request(SPECS[0], key=i)).sampling.seed for i in ids]
    assert seeds[0] == seeds[1] != seeds[2]


def test_moondream2_samples_text_and_not_coordinates():
    """Text has the model's own temperature; spatial skills are greedy."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    text = frontend.make_task(request(SPECS[0])).sampling
    assert (text.temperature, text.top_p) == (0.5, 0.3)
    assert frontend.make_task(request(SPECS[2])).sampling.temperature == 0.0
    assert frontend.tasks == ("query", "caption", "detect", "point", "reasoning")


def test_reasoning_is_a_task_where_there_is_a_template(tiny_config):
    """Beside the skills that have one; a model without it says so."""
    templates = msgspec.structs.replace(tiny_config.templates, query_reasoning=None)
    plain = msgspec.structs.replace(tiny_config, templates=templates)
    tasks = [MoondreamFrontend(each, StandInTokenizer()).tasks for each in (tiny_config, plain)]
    assert tasks == [(*SKILLS, "reasoning"), SKILLS]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("a", "")}, "stop"),
    ],
)
def test_sampling_out_of_range_is_named(frontend, sampling, field):
    """The error names the field."""
    assert field_of(frontend, request(SPECS[0], **sampling)) == field


@pytest.mark.parametrize(
    "task", [DetectSpec(object="c", max_objects=0), PointSpec(object="c", max_objects=-1)]
)
def test_max_objects_is_positive(frontend, task):
    """A bound below 1 is refused."""
    assert field_of(frontend, request(task)) == "max_objects"


def test_budgets_of_spatial_skills():
    """Three tokens a box, two a point, and EOS; 50 boxes and 150 points by default."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    assert frontend.make_task(request(DetectSpec(object="c"))).max_tokens == 151
    assert frontend.make_task(request(PointSpec(object="c"))).max_tokens == 301
    assert frontend.make_task(request(DetectSpec(object="c", max_objects=4))).max_tokens == 13
    assert frontend.make_task(request(DetectSpec(object="c"), max_tokens=5)).max_tokens == 5


@pytest.mark.parametrize("asked", [None, 5000])
def test_max_tokens_is_cut_to_the_context(frontend, tiny_config, asked):
    """Every token but the last needs a position of the context."""
    task = frontend.make_task(request(SPECS[0], max_tokens=asked))
    used = frontend.prefix_length(True) + len(task.prompt) + task.max_tokens - 1
    assert used == tiny_config.text.max_context


def test_a_prompt_that_leaves_no_room_is_refused(frontend, tiny_config):
    """The error has the limit and the actual length; one position less fits."""
    room = tiny_config.text.max_context - frontend.prefix_length(True) - 5
    task = frontend.make_task(request(QuerySpec(question="x" * room)))
    assert task.max_tokens == 1
    with pytest.raises(PromptTooLong) as caught:
        frontend.make_task(request(QuerySpec(question="x" * (room + 1))))
    limit = tiny_config.text.max_context
    assert caught.value.metadata == {"limit": str(limit), "actual": str(limit + 1)}


def test_reasoning_needs_its_template(frontend):
    """A model without reasoning template refuses it."""
    config = legato_tiny_config()
    templates = msgspec.structs.replace(config.templates, query_reasoning=None)
    plain = MoondreamFrontend(
        msgspec.structs.replace(config, templates=templates), StandInTokenizer()
    )
    with pytest.raises(TaskUnsupported, match="reasoning"):
        plain.make_task(request(QuerySpec(question="?", reasoning=True)))


def test_a_prepared_image_says_what_it_weighs(prepare, frontend):
    """`num_bytes` is the size of the pixels, and the key is the given one."""
    image = prepare(frontend, 150, 150)
    assert image.num_bytes == image.pixels.pixels_NHWC.nbytes == 5 * 56 * 56 * 3
    assert image.key == "150x150:0"


# ---------------------------------------------------------------- prompts

TOKENIZER = StandInTokenizer()
CUP = TOKENIZER.encode("cup")
SPACE_CUP = TOKENIZER.encode(" cup")


@pytest.fixture(scope="module")
def moondream2():
    """Moondream 2's templates over bytes as tokens."""
    return Prompts(moondream2_config(), TOKENIZER)


def ids(prompt):
    """Token ids of a prompt."""
    return tuple(token.token_id for token in prompt)


@pytest.mark.parametrize(("length", "word"), [("short", 12492), ("normal", 6382), ("long", 4059)])
def test_caption_of_moondream2(moondream2, length, word):
    """A caption's prompt is its template."""
    assert ids(moondream2.caption(CaptionLength(length))) == (1, 32708, 2, word, 3)


def test_prompts_of_moondream2(moondream2):
    """The doubled answer token, the space before an object, and stripped text."""
    assert ids(moondream2.query(" cup\n", (), reasoning=False)) == (1, 15381, 2, *CUP, 3, 3)
    assert ids(moondream2.query("cup", (), reasoning=True)) == (1, 15381, 2, *CUP, 3, 4)
    assert ids(moondream2.detect("cup ")) == (1, 7235, 476, 2, *SPACE_CUP, 3)
    assert ids(moondream2.point("cup", ())) == (1, 2581, 2, *SPACE_CUP, 3)


def test_lengths_of_moondream3():
    """Prefix and prompt have the published lengths; a point adds two positions, a box three."""
    prompts, prefix = Prompts(moondream3_config(), TOKENIZER), moondream3_config().prefix_length
    n, spaced = len(CUP), len(SPACE_CUP)
    refs = (ImagePoint(x=0.1, y=0.7), ImageBox(x_min=0.25, y_min=0.5, x_max=0.75, y_max=0.625))
    assert prefix + len(prompts.caption(CaptionLength.SHORT)) == 735
    assert prefix + len(prompts.query("cup", (), reasoning=False)) == 734 + n
    assert prefix + len(prompts.query("cup", (), reasoning=True)) == 734 + n
    assert prefix + len(prompts.detect("cup")) == 735 + spaced
    assert prefix + len(prompts.point("cup", refs)) == 734 + spaced + 5
    assert prefix + len(prompts.segment("cup", refs)) == 734 + n + 5


def test_a_conversation_of_moondream2(moondream2):
    """Each turn is a whole query and its answer, without EOS; the last one is open."""
    history = (Turn(question=" cup", answer=" a\n"), Turn(question="cup", answer="b"))
    a, b = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    query = (1, 15381, 2, *CUP)
    earlier = (*query, 3, 3, *a, *query, 3, 3, *b)
    chat = moondream2.query("cup", (), reasoning=False, history=history)
    assert ids(chat) == (*earlier, *query, 3, 3)
    thinking = moondream2.query("cup", (), reasoning=True, history=history)
    assert ids(thinking) == (*earlier, *query, 3, 4)


def test_the_system_speaks_in_the_first_question(moondream2):
    """Its text precedes the first question, with a blank line between."""
    short = TOKENIZER.encode("Be short.\n\ncup")
    alone = moondream2.query("cup", (), reasoning=False, system=" Be short.\n")
    assert ids(alone) == (1, 15381, 2, *short, 3, 3)
    turn = Turn(question="cup", answer="cup")
    later = moondream2.query("cup", (), reasoning=False, system="Be short.", history=(turn,))
    assert ids(later) == (1, 15381, 2, *short, 3, 3, *CUP, 1, 15381, 2, *CUP, 3, 3)


def test_references_belong_to_the_last_question(moondream2):
    """References in a conversation follow the prefix of its last question."""
    turn = Turn(question="cup", answer="cup")
    prompt = moondream2.query("cup", (ImagePoint(x=0.5, y=0.5),), reasoning=False, history=(turn,))
    assert ids(prompt)[-(4 + len(CUP)) - 3 :] == (1, 15381, 2, 5, 5, *CUP, 3, 3)
    assert ids(prompt).count(5) == 2


def test_an_empty_question_is_refused(moondream2):
    """The error names the messages."""
    empty = Turn(question=" ", answer="a")
    for history, shows_image in [
        ((empty,), False),
        ((Turn(question="cup", answer="a"), empty), True),
    ]:
        with pytest.raises(InvalidField) as caught:
            moondream2.query("cup", (), reasoning=False, history=history, shows_image=shows_image)
        assert caught.value.metadata["field"] == "messages"


def test_an_answer_may_be_empty(moondream2):
    """It takes no positions in the prompt."""
    prompt = moondream2.query(
        "cup", (), reasoning=False, history=(Turn(question="cup", answer=" "),)
    )
    assert ids(prompt) == (1, 15381, 2, *CUP, 3, 3) * 2


def test_an_image_without_text_asks_for_a_caption(moondream2):
    """It takes the prompt of a caption, first in the conversation; text of the system is text."""
    caption = ids(moondream2.caption(CaptionLength.NORMAL))
    alone = moondream2.query(" ", (), reasoning=False, shows_image=True)
    assert ids(alone) == caption
    turn = Turn(question="", answer="cup")
    later = moondream2.query("cup", (), reasoning=True, history=(turn,), shows_image=True)
    assert ids(later) == (*caption, *CUP, 1, 15381, 2, *CUP, 3, 4)
    told = moondream2.query("", (), reasoning=False, system="cup", shows_image=True)
    assert ids(told) == (1, 15381, 2, *CUP, 3, 3)
    for more in ({"reasoning": True}, {"reasoning": False, "refs": (ImagePoint(x=0.5, y=0.5),)}):
        with pytest.raises(InvalidField, match="need a question"):
            moondream2.query("", **{"refs": (), "shows_image": True, **more})


def test_a_gaze_is_a_point_with_an_eye(moondream2):
    """A gaze is a point at "gaze" with the eye as reference."""
    prompt = moondream2.point("gaze", (ImagePoint(x=0.25, y=0.125),))
    gaze = [PromptToken(token_id) for token_id in TOKENIZER.encode(" gaze")]
    assert prompt[3:] == (
        PromptToken(5, (0.25, 0.0)),
        PromptToken(5, (0.125, 0.0)),
        *gaze,
        PromptToken(3),
    )


def test_moondream2_cannot_segment(moondream2):
    """A skill without template is unsupported, by name."""
    with pytest.raises(TaskUnsupported, match="segment"):
        moondream2.segment("cup", ())


def test_references_stand_before_the_text():
    """A point is two coords, a box centre and size, exact, right after the prefix."""
    prompts = Prompts(tiny_random_config(), TOKENIZER)
    refs = (ImagePoint(x=0.1, y=0.7), ImageBox(x_min=0.25, y_min=0.5, x_max=0.75, y_max=0.625))
    prompt = prompts.segment("cup", refs)
    assert prompt[3:8] == (
        PromptToken(5, (0.1, 0.0)),
        PromptToken(5, (0.7, 0.0)),
        PromptToken(5, (0.5, 0.0)),
        PromptToken(5, (0.5625, 0.0)),
        PromptToken(6, (0.5, 0.125)),
    )
    assert ids(prompt)[8:] == (*CUP, 3)


@pytest.mark.parametrize(
    "ref",
    [
        ImagePoint(x=-0.1, y=0.5),
        ImagePoint(x=0.5, y=1.5),
        ImagePoint(x=math.nan, y=0.5),
        ImagePoint(x=math.inf, y=0.5),
        ImageBox(x_min=0.5, y_min=0.1, x_max=0.4, y_max=0.2),
        ImageBox(x_min=0.1, y_min=0.3, x_max=0.4, y_max=0.2),
        ImageBox(x_min=0.1, y_min=0.1, x_max=1.4, y_max=0.2),
    ],
)
def test_references_outside_the_image_are_refused(moondream2, ref):
    """Values are finite, within 0..1, and ordered."""
    with pytest.raises(InvalidField) as caught:
        moondream2.query("cup", (ref,), reasoning=False)
    assert caught.value.metadata["field"] == "spatial_refs"


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_empty_text_is_refused(moondream2, empty):
    """Whitespace as question or object is an error."""
    with pytest.raises(InvalidField) as caught:
        moondream2.query(empty, (), reasoning=False)
    assert caught.value.metadata["field"] == "question"
    with pytest.raises(InvalidField) as caught:
        moondream2.detect(empty)
    assert caught.value.metadata["field"] == "object"


# ---------------------------------------------------------------- tokenizer
# Text survives encoding and decoding, and never becomes special ids.

SPECIAL = ["<|endoftext|>", *(f"<|reserved_{index}|>" for index in range(1, NUM_SPECIAL))]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A byte-level tokenizer with merges, some of whose special tokens are flagged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a red cup and a red car", "the cat sat"] * 9, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"][3]["special"] = False
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="session", params=["bpe", "stand-in"])
def tokenizer(request, tokenizer_json):
    """Both implementations."""
    return BytePairTokenizer(tokenizer_json) if request.param == "bpe" else StandInTokenizer()


@given(text=st.text())
def test_pieces_add_up_to_the_text(tokenizer, text):
    """The bytes of a text's tokens are the text's bytes."""
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("literal", [SPECIAL[0], SPECIAL[3], f"a{SPECIAL[5]}b {SPECIAL[0]}"])
def test_literal_special_tokens_are_text(tokenizer, literal):
    """Text that spells a special token is encoded to plain ids."""
    ids = tokenizer.encode(literal)
    assert min(ids) >= NUM_SPECIAL
    assert b"".join(map(tokenizer.piece, ids)) == literal.encode()


def test_special_ids_carry_no_text(tokenizer):
    """No special id has text."""
    assert all(tokenizer.piece(token_id) == b"" for token_id in range(NUM_SPECIAL))


def test_merges_are_used(tokenizer_json):
    """A learned word is fewer tokens than letters."""
    assert len(BytePairTokenizer(tokenizer_json).encode("a red cup")) < 9


def test_unknown_ids_have_no_text(tokenizer_json):
    """Ids beyond the vocabulary give nothing."""
    assert BytePairTokenizer(tokenizer_json).piece(99999) == b""


@pytest.mark.parametrize("text", ["{}", "no json", '{"decoder": {"type": "WordPiece"}}'])
def test_other_files_are_refused(tmp_path, text):
    """The error of a file of another kind names it."""
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(InvalidField, match=r"tokenizer\.json"):
        BytePairTokenizer(path)


def test_a_missing_file_is_named(tmp_path):
    """The error of a missing tokenizer names its path."""
    with pytest.raises(InvalidField, match="nowhere"):
        BytePairTokenizer(tmp_path / "nowhere.json")


# ---------------------------------------------------------------- preprocess
# Tilings by table, and the pixels of crops.

VISION = moondream2_config().vision

TABLE = [
    ((378, 378), (1, 1)),
    ((378, 5000), (1, 1)),
    ((5000, 100), (1, 1)),
    ((379, 379), (3, 3)),
    ((512, 512), (3, 3)),
    ((1024, 1024), (3, 3)),
    ((4000, 4000), (3, 3)),
    ((640, 480), (2, 4)),
    ((800, 600), (2, 4)),
    ((850, 600), (2, 4)),
    ((1280, 720), (2, 4)),
    ((1920, 1080), (2, 4)),
    ((3840, 2160), (2, 4)),
    ((4000, 3000), (2, 4)),
    ((480, 640), (4, 2)),
    ((720, 1280), (4, 2)),
    ((1080, 1920), (4, 2)),
    ((1024, 768), (3, 4)),
    ((2048, 1536), (3, 4)),
    ((1500, 2000), (4, 3)),
    ((3000, 1000), (2, 5)),
    ((5000, 400), (1, 10)),
    ((380, 2000), (6, 1)),
]


@pytest.mark.parametrize(("size", "tiling"), TABLE)
def test_tiling_of_moondream2(size, tiling):
    """Known images (width, height) have known rows and columns."""
    width, height = size
    assert select_tiling(height, width, VISION) == tiling


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_tiling_stays_within_its_bounds(height, width):
    """Only an image for which one row is too many gets more than `max_crops` tiles."""
    rows, columns = select_tiling(height, width, VISION)
    assert min(rows, columns) >= 1
    assert rows * columns <= 12 or min(rows, columns) == 1


def test_a_model_of_one_crop_never_tiles(noise_image):
    """`max_crops` 1 gives the whole image alone, whatever its size."""
    vision = legato_tiny_config().vision
    crops = crop_image(noise_image(2000, 1500), vision)
    assert crops.tiling == (1, 1)
    assert crops.pixels_NHWC.shape == (1, 336, 336, 3)


def test_tiles_are_windows_of_the_resized_image(noise_image, tiny_config):
    """Tiles follow the whole image row by row, each a window further."""
    vision = tiny_config.vision
    image = noise_image(150, 150)
    crops = crop_image(image, vision)
    assert crops.tiling == (2, 2)
    assert crops.pixels_NHWC.dtype == np.uint8
    side = 2 * 28 + 2 * 14
    canvas = np.array(image.resize((side, side), 1))
    whole = np.array(image.resize((56, 56), 1))
    assert np.array_equal(crops.pixels_NHWC[0], whole)
    for index, (y, x) in enumerate([(0, 0), (0, 28), (28, 0), (28, 28)]):
        assert np.array_equal(crops.pixels_NHWC[1 + index], canvas[y : y + 56, x : x + 56])


def test_a_small_image_is_encoded_once(noise_image, tiny_config):
    """Tiling (1, 1) has no second copy of the whole image."""
    crops = crop_image(noise_image(30, 20), tiny_config.vision)
    assert crops.tiling == (1, 1)
    assert crops.pixels_NHWC.shape == (1, 56, 56, 3)


INFO = ImageProperties(image_id="img", width=1, height=1, cache_hit=False)


@pytest.mark.parametrize("size", [(850, 600), (480, 640), (300, 300), (900, 379)])
def test_the_device_is_told_to_make_the_same_crops(noise_image, size):
    """The plan's canvas and whole image, cut into tiles, are Pillow's crops."""
    image = noise_image(*size)
    crops = crop_image(image, VISION)
    whole = whole_image(np.asarray(image), VISION)
    assert whole is not None
    assert whole.tiling == crops.tiling
    plan = CutPlan(image.height, image.width, whole.tiling, crop_geometry(VISION))
    assert plan.num_crops == len(crops.pixels_NHWC)
    sizes = [(target.to_width, target.to_height) for target in plan.targets]
    canvases = [np.asarray(image.resize(size, Image.Resampling.LANCZOS)) for size in sizes]
    assert np.array_equal(canvases[0], crops.pixels_NHWC[0])
    for index, crop_HWC in enumerate(crops.pixels_NHWC[1:]):
        y, x = (VISION.window * step for step in divmod(index, whole.tiling[1]))
        assert np.array_equal(canvases[1][y : y + 378, x : x + 378], crop_HWC)


def test_an_image_for_the_device_stays_whole(noise_image):
    """The host cuts nothing, and `num_bytes` is that of the image's own pixels."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer()).resizing_on_device()
    pixels_HWC = np.asarray(noise_image(850, 600))
    image = frontend.prepare_image(pixels_HWC, "key", INFO)
    assert isinstance(image.pixels, WholeImage)
    assert image.pixels.tiling == (2, 4)
    assert np.shares_memory(image.pixels.pixels_HWC, pixels_HWC)
    assert image.num_bytes == 850 * 600 * 3
    assert isinstance(frontend.prepare_image(noise_image(850, 600), "key", INFO).pixels, WholeImage)


def test_an_image_without_room_on_the_device_is_cut_on_the_host():
    """An image beyond the device's buffers becomes crops."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer()).resizing_on_device()
    image = frontend.prepare_image(np.zeros((20, 900_000, 3), np.uint8), "key", INFO)
    assert isinstance(image.pixels, CroppedImage)
    assert image.num_bytes == 378 * 378 * 3


def test_an_image_of_too_many_crops_is_cut_on_the_host():
    """Thin images may have more tiles than the device's buffers; others stay whole."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer()).resizing_on_device()
    thin = frontend.prepare_image(np.zeros((430, 20_000, 3), np.uint8), "key", INFO)
    assert isinstance(thin.pixels, CroppedImage)
    assert len(thin.pixels.pixels_NHWC) > 1 + VISION.max_crops
    assert thin.num_crops == 0
    plain = frontend.prepare_image(np.zeros((600, 850, 3), np.uint8), "key", INFO)
    assert plain.num_crops == plain.pixels.plan.num_crops == 9


def test_pixels_and_pillow_images_are_cut_alike(noise_image):
    """An array and a Pillow image give the same crops."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    images = [
        frontend.prepare_image(given, "key", INFO)
        for given in (noise_image(500, 400), np.asarray(noise_image(500, 400)))
    ]
    assert np.array_equal(images[0].pixels.pixels_NHWC, images[1].pixels.pixels_NHWC)
    assert images[0].num_bytes == images[1].num_bytes == images[0].pixels.pixels_NHWC.nbytes
