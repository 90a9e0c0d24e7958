"""The Moondream frontend."""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image

from legato_engine.core.images import ImageInfo
from legato_engine.core.requests import Request
from legato_engine.core.task_specs import (
    SKILL_OF_TASK,
    SKILLS,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SegmentTask,
)
from legato_engine.errors import InvalidField
from legato_engine.models import budget
from legato_engine.models.budget import SamplingDefaults
from legato_engine.models.confidence import Calibration, CalibrationFile, confidence_info
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.constraints import constraint_table
from legato_engine.models.moondream.preprocess import (
    CroppedImage,
    Pixels,
    WholeImage,
    crop_image,
    whole_image,
)
from legato_engine.models.moondream.prompts import Prompt, Prompts, clean
from legato_engine.models.moondream.tasks.caption import CaptionSkill
from legato_engine.models.moondream.tasks.detect import DetectSkill
from legato_engine.models.moondream.tasks.object_list import Listing
from legato_engine.models.moondream.tasks.point import PointSkill
from legato_engine.models.moondream.tasks.query import QuerySkill, ReasonedQuerySkill
from legato_engine.models.moondream.tasks.reasoning import ReasoningOutput
from legato_engine.models.moondream.tasks.segment import SegmentSkill
from legato_engine.models.moondream.tasks.skill_task import SkillTask, TaskSetup
from legato_engine.models.moondream.tokenizer import Tokenizer
from legato_engine.models.text_output import TextOutput
from legato_engine.models.token_log import TokenLog


class MoondreamFrontend:
    """A thread-safe `ModelFrontend`.

    `resize_on_device`: images stay uncropped if the device's buffers hold them. `keep_images`:
    crops keep their image.
    """

    def __init__(
        self,
        config: MoondreamConfig,
        tokenizer: Tokenizer,
        *,
        calibrations: CalibrationFile | None = None,
        resize_on_device: bool = False,
        keep_images: bool = False,
    ) -> None:
        self.name = config.name
        self.takes_images = True
        skills = tuple(s for s in SKILLS if getattr(config.templates, s) is not None)
        reasons = config.templates.query_reasoning is not None
        self.tasks = (*skills, "reasoning") if reasons else skills
        self.constraints = constraint_table(config)
        self.vocab_size = config.text.vocab_size
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = Prompts(config, tokenizer)
        self._resize_on_device = resize_on_device
        self._keep_images = keep_images
        self._calibrations = calibrations
        self.confidence = confidence_info(self.tasks, calibrations)

    def resizing_on_device(self) -> MoondreamFrontend:
        return MoondreamFrontend(
            self._config,
            self._tokenizer,
            calibrations=self._calibrations,
            resize_on_device=True,
            keep_images=self._keep_images,
        )

    def keeping_images(self) -> MoondreamFrontend:
        return MoondreamFrontend(
            self._config,
            self._tokenizer,
            calibrations=self._calibrations,
            resize_on_device=self._resize_on_device,
            keep_images=True,
        )

    def prepare_image(
        self, image_rgb: Image.Image | Pixels, key: str, info: ImageInfo
    ) -> PreparedImage:
        """Prepare PIL RGB or pixels [H, W, 3], to which the result may refer."""
        pixels = self._layout(image_rgb)
        return PreparedImage(
            key=key,
            pixels=pixels,
            info=info,
            num_bytes=pixels.num_bytes,
            num_crops=pixels.plan.num_crops if isinstance(pixels, WholeImage) else 0,
        )

    def prefix_length(self, has_image: bool) -> int:
        return self._config.prefix_length if has_image else 1

    def make_task(self, request: Request) -> SkillTask:
        match request.task:
            case QueryTask():
                return self._query(request, request.task)
            case CaptionTask():
                prompt = self._prompts.caption(request.task.length)
                setup = self._setup(request, prompt, self._config.sampling)
                return CaptionSkill(setup, self._answer(request))
            case DetectTask():
                prompt = self._prompts.detect(request.task.object)
                return self._listing(DetectSkill, request, request.task, prompt)
            case PointTask():
                prompt = self._prompts.point(request.task.object, request.task.spatial_refs)
                return self._listing(PointSkill, request, request.task, prompt)
            case SegmentTask():
                prompt = self._prompts.segment(request.task.object, request.task.spatial_refs)
                setup = self._setup(request, prompt, SamplingDefaults())
                return SegmentSkill(setup, clean(request.task.object, "object"), self._tokenizer)

    def _layout(self, image_rgb: Image.Image | Pixels) -> CroppedImage | WholeImage:
        if self._resize_on_device:
            whole = whole_image(np.asarray(image_rgb), self._config.vision)
            if whole is not None:
                return whole
        if isinstance(image_rgb, np.ndarray):
            image_rgb = Image.fromarray(image_rgb)
        crops = crop_image(image_rgb, self._config.vision)
        if self._keep_images:
            crops = dataclasses.replace(crops, original=np.asarray(image_rgb))
        return crops

    def _query(self, request: Request, task: QueryTask) -> SkillTask:
        prompt = self._prompts.query(
            task.question,
            task.spatial_refs,
            reasoning=task.reasoning,
            system=task.system,
            history=task.history,
            shows_image=task.shows_image,
        )
        needs_image = task.shows_image or bool(task.spatial_refs)
        setup = self._setup(request, prompt, self._config.sampling, needs_image=needs_image)
        answer = self._answer(request)
        if not task.reasoning or self._config.templates.query is None:
            return QuerySkill(setup, answer)
        reasoning = ReasoningOutput(self._tokenizer, self._config.tokens)
        return ReasonedQuerySkill(setup, answer, reasoning, self._config.num_answer_tokens)

    def _listing(
        self,
        skill: type[DetectSkill | PointSkill],
        request: Request,
        task: DetectTask | PointTask,
        prompt: Prompt,
    ) -> SkillTask:
        limit = budget.max_objects(task.max_objects, skill.default_max_objects)
        most = max(limit, skill.default_max_objects) if task.min_confidence else limit
        needed = most * skill.tokens_per_object + 1  # and EOS
        setup = self._setup(request, prompt, SamplingDefaults(max_tokens=needed))
        return skill(setup, Listing.of(task, clean(task.object, "object"), limit))

    def _answer(self, request: Request) -> TextOutput:
        return TextOutput(self._tokenizer, request.sampling.stop)

    def _setup(
        self,
        request: Request,
        prompt: Prompt,
        defaults: SamplingDefaults,
        *,
        needs_image: bool = True,
    ) -> TaskSetup:
        has_image = request.image is not None
        if needs_image and not has_image:
            raise InvalidField("this task needs an image", field="image")
        sampling = budget.resolve_sampling(request, defaults)
        max_tokens = budget.token_budget(
            sampling.max_tokens or defaults.max_tokens,
            self.prefix_length(has_image) + len(prompt),
            self._config.text.max_context,
        )
        config = self._config
        return TaskSetup(
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            tokens=config.tokens,
            values_in_text=config.has_values_in_text,
            log=self._log(request),
            calibration=self._calibration(request),
        )

    def _calibration(self, request: Request) -> Calibration:
        """An adapter makes another model of it, which was not calibrated."""
        if self._calibrations is None or request.adapter:
            return Calibration()
        skill = SKILL_OF_TASK[type(request.task)]
        return self._calibrations.skills.get(skill, Calibration())

    def _log(self, request: Request) -> TokenLog | None:
        if not request.return_tokens:
            return None
        tokens = self._config.tokens
        return TokenLog(
            self._tokenizer,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            coord=tokens.coord,
            size=tokens.size,
        )
