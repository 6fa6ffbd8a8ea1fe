"""Run by vLLM's own interpreter: what it makes of images.

Reads {"model": ..., "processor": settings of the image processor, "images": [base64, ...]} from stdin. Writes for each
image [the name that vLLM gives it, its tokens], or null where it refuses it.
"""

import importlib
import json
import sys


def main() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from vllm.multimodal.hasher import MultiModalHasher

    asked = json.load(sys.stdin)
    images = importlib.import_module("vllm.multimodal.media").ImageMediaIO()
    processor = Qwen2VLImageProcessorPil(**asked["processor"])
    merged = processor.merge_size**2
    found = []
    for data in asked["images"]:
        try:
            item = images.load_base64("image/png", data)
            made = processor(images=[item.media], return_tensors="np")
        except Exception:
            found.append(None)
            continue
        name = MultiModalHasher.hash_kwargs("blake3", model_id=asked["model"], image=item)
        found.append([name, int(made["image_grid_thw"][0].prod()) // merged])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
