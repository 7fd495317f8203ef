"""Weights from a folder of safetensors files into a decoder, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from executor.models.decoder import Decoder

Named = tuple[str, Tensor]
Progress = Callable[[str, float], None]  # (what is being done, share done in 0 .. 1)


class BadModel(ValueError):
    """A model's files are missing, damaged or do not fit each other; the message says which."""


def fill(decoder: Decoder, weights: Iterable[Named], on_progress: Progress) -> None:
    """Copy every weight to its place in `decoder`, converting to the decoder's type.

    Raises:
        BadModel: a weight is missing, unknown, given twice or has another shape.
    """
    places = decoder.parameters()
    total = len(places)
    unknown: list[str] = []
    for name, weight in weights:
        place = places.pop(name, None)
        if place is None:
            # Old exports carry computed buffers; tied models may carry the head a second time.
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and decoder.config.tied
            ):
                continue
            unknown.append(name)
            continue
        if place.shape != weight.shape:
            raise BadModel(
                f"weight {name} is {list(weight.shape)}; the config asks for {list(place.shape)}"
            )
        with torch.inference_mode():
            place.copy_(weight)
        on_progress("loading weights", 1 - len(places) / total)
    if unknown:
        raise BadModel(f"{len(unknown)} weights have no place in the model, such as {unknown[0]}")
    if places:
        raise BadModel(f"{len(places)} weights are missing, such as {next(iter(places))}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index names, or all there are.

    Raises:
        BadModel: there are none, or the index names one that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = json.loads(index.read_bytes()).get("weight_map", {}).values()
        files = [folder / name for name in sorted(set(named))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise BadModel(f"{index} names {file.name}, which is not in the folder")
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
        if pickled:
            raise BadModel(
                f"{folder} has weights only as {pickled[0].name}, a pickle, which can run code when "
                "loaded; convert it to safetensors"
            )
        raise BadModel(f"{folder} has no .safetensors file")
    return files


def safetensors_weights(files: Iterable[Path]) -> Iterator[Named]:
    """Every tensor of the files, each mapped from disk only while it is looked at.

    Raises:
        BadModel: a file is not in safetensors format.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    yield name, reader.get_tensor(name)
        except OSError:
            raise
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise BadModel(f"{file} is not a readable safetensors file: {error}") from error
