"""Run by vLLM's own interpreter: into which tiles an image of Llama 4 is cut.

Reads [[{"tile": ..., "most": ..., "largest": ...}, [[width, height], ...]], ...] from stdin, writes for each of these
settings [[rows, columns], ...].
"""

import json
import sys


def main() -> None:
    import torch
    from transformers.image_utils import SizeDict
    from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit

    found = []
    for setting, sizes in json.load(sys.stdin):
        tile = setting["tile"]
        choices = torch.tensor(find_supported_resolutions(setting["most"], SizeDict(height=tile, width=tile)))
        fits = [get_best_fit((height, width), choices, setting["largest"]) for width, height in sizes]
        found.append([[int(side) // tile for side in fit] for fit in fits])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
