"""vLLM's own server for the models of `tests.vision_models`, without torchvision.

vLLM's processor places and prepares images. It gets the image processor that needs Pillow alone,
and no processor of videos.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

import winnow.rollout.vllm.vision  # noqa: F401  # replaces modules that need torchvision

from vllm.model_executor.models import qwen2_5_vl as theirs  # isort: skip


class Processor(Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


class Info(theirs.Qwen2_5_VLProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_hf_processor(self, **kwargs: Any) -> Any:
        config, tokenizer = self.get_hf_config(), self.get_tokenizer()
        tokenizer.image_token = tokenizer.convert_ids_to_tokens(config.image_token_id)
        tokenizer.video_token = tokenizer.convert_ids_to_tokens(config.video_token_id)
        images = Qwen2VLImageProcessorPil.from_pretrained(self.ctx.model_config.model)
        return Processor(images, tokenizer, None)


register = MULTIMODAL_REGISTRY.register_processor(
    theirs.Qwen2_5_VLMultiModalProcessor,
    info=Info,
    dummy_inputs=theirs.Qwen2_5_VLDummyInputsBuilder,
)
name = "Qwen2_5_VLForConditionalGeneration"
ModelRegistry.register_model(name, register(type(name, (getattr(theirs, name),), {})))

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
