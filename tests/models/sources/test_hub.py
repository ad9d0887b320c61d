"""Models by their name on the hub, fetched by `paceline prepare` from a small hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from paceline.core.adapters import Adapter, read_adapter
from paceline.core.model_folder import read_model_files
from paceline.core.pooling_files import pooling_files
from paceline.core.pooling_folder import read_pooling_config
from paceline.models.config import read_facts
from paceline.models.identity import model_identity
from paceline.models.sources.hub_adapter import HubAdapter, parse_hub_adapter
from paceline.models.sources.hub_name import HubName, parse_hub_name
from paceline.services.gateway.planning.media.processors.families import read_processor
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.adapters import write_adapter
from tests.models.fake_hub import COMMIT, FakeHub, serve_hub
from tests.services.gateway.toy_model import write_toy_model
from tests.services.pool.tiny_bert import write_tiny_bert
from tests.tiny_checkpoints import (
    FAMILIES,
    write_gemma3_with_vision,
    write_gemma4_assistant,
    write_gemma4_unified,
    write_llava,
    write_qwen3_5_with_vision,
    write_qwen3_vl,
    write_tiny,
)

ROOT = Path(__file__).parents[3]
TEXT = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
]
WITH_MEDIA: Mapping[str, Callable[[Path], object]] = {
    "qwen3_vl": write_qwen3_vl,
    "qwen3_5_vision": write_qwen3_5_with_vision,
    "gemma3_vision": write_gemma3_with_vision,
    "gemma4_unified": write_gemma4_unified,
    "llava": write_llava,
}
UNWANTED = ["README.md", "pytorch_model.bin", "model.onnx", "original/model.safetensors", "tokenizer.model"]

Prepare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as running:
        yield running


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model's folder, with files that serving does not need."""
    folder = tmp_path / "checkpoint"
    write_tiny(folder, "llama")
    for name in [*TEXT, *UNWANTED]:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(json.dumps({"name": name}))  # the cache keeps equal files once
    return folder


@pytest.fixture
def prepare(tmp_path: Path, hub: FakeHub) -> Prepare:
    """Run `paceline prepare` with the hub's URL and an empty cache.

    `variables` are added to the environment. The signal `stop` is sent when the hub has stalled.
    """
    foreign = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}

    def prepare(
        *arguments: str, stop: signal.Signals | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "PACELINE_CACHE": str(tmp_path / "cache"),
            **variables,
        }
        command = [sys.executable, "-m", "paceline", "prepare", *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            env=environment,
            cwd=tmp_path,
            stdout=pipe,
            stderr=pipe,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if a shell runs tests with `&`
        ) as process:
            if stop is not None:
                assert hub.stalls.wait(60)
                process.send_signal(stop)
            output, errors = process.communicate(timeout=300)
            return subprocess.CompletedProcess(command, process.returncode, output, errors)

    return prepare


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("paceline: ")


def test_an_encoder_comes_with_its_modules(hub: FakeHub, tmp_path: Path, prepare: Prepare) -> None:
    source = tmp_path / "encoder"
    write_tiny_bert(source)
    dense = source / "3_Dense"
    dense.mkdir()
    values = {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.Identity"}
    (dense / "config.json").write_text(json.dumps(values))
    save_file({"linear.weight": torch.ones(8, 32)}, dense / "model.safetensors")
    (source / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    modules = json.loads((source / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (source / "modules.json").write_text(json.dumps(modules))
    wanted = pooling_files(source)
    for unwanted in ("3_Dense/pytorch_model.bin", "onnx/model.onnx"):
        (source / unwanted).parent.mkdir(exist_ok=True)
        (source / unwanted).write_text("unwanted")
    hub.add("org/encoder", source)
    folder = folder_of(prepare("org/encoder"))
    assert pooling_files(folder) == wanted
    assert read_pooling_config(folder) == read_pooling_config(source)
    # Models that cannot be served are refused before their weights are downloaded.
    modules[3]["type"] = "custom.Layer"
    (source / "modules.json").write_text(json.dumps(modules))
    hub.add("org/other", source)
    hub.requests.clear()
    assert "org/other/modules.json lists the module custom.Layer" in error_of(prepare("org/other"))
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_only_what_serving_needs_is_fetched_and_only_once(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/tiny", checkpoint)
    done = prepare("org/tiny")
    folder = folder_of(done)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert sorted(path.name for path in folder.iterdir()) == sorted([*TEXT, "model.safetensors"])
    assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert f"downloading {size // 1000} kB of org/tiny" in done.stderr
    assert sorted(hub.fetched()) == sorted([*TEXT, "model.safetensors"])
    hub.requests.clear()
    assert folder.name == COMMIT
    assert folder_of(prepare("org/tiny", "--revision=v1")) == folder
    assert folder_of(prepare("org/tiny", f"--revision={COMMIT}")) == folder
    assert hub.fetched() == []


@pytest.mark.parametrize(
    "families", [["llama", "qwen3_vl"], pytest.param([*FAMILIES, *WITH_MEDIA], marks=pytest.mark.thorough)], ids=len
)
def test_every_family_is_the_same_from_the_hub_and_from_a_folder(
    tmp_path: Path, hub: FakeHub, families: list[str]
) -> None:
    folders = {name: write_family(tmp_path / "families" / name, name) for name in families}
    for name, folder in folders.items():
        hub.add(f"org/{name}", folder)
    # One process fetches all of them, because the imports take longer than that.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    code = f"""
from pathlib import Path
from paceline.models.sources.assets import resolve_model
for name in {sorted(folders)!r}:
    print(resolve_model("org/" + name, Path("cache"), lambda said: None, model_impl="auto"))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (name, folder), fetched in zip(sorted(folders.items()), done.stdout.split(), strict=True):
        own, theirs = (resolved(path) for path in (folder, Path(fetched)))
        assert own == theirs, name


def write_family(folder: Path, name: str) -> Path:
    """Write a tiny checkpoint of a family, with settings that differ from all defaults."""
    write_toy_model(folder, temperature=0.3, top_k=7)
    WITH_MEDIA.get(name, partial(write_tiny_config, family=name))(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    if not (folder / "preprocessor_config.json").exists():
        (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5], "resample": 3}')
    (folder / "video_preprocessor_config.json").write_text('{"fps": 3.0, "min_frames": 6, "max_frames": 8}')
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|user|>"}')
    return folder


def write_tiny_config(folder: Path, family: str) -> None:
    """Write a tiny checkpoint without a matrix, because neither the hub nor a gateway reads any."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**own)
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def resolved(folder: Path) -> list[Any]:
    """Return what workers and gateways read from a model's folder."""
    tokenizer = Tokenizer(folder)
    return [
        model_identity(folder, "bfloat16"),
        model_identity(folder, "bfloat16", code="transformers"),
        read_model_files(folder),
        read_facts(folder, "auto"),
        repr(read_processor(folder)),
        tokenizer.defaults,
        tokenizer.eos_token_ids,
        tokenizer.chat_template_source,
        tokenizer._special_tokens,
    ]


def test_an_assistant_comes_like_a_model(tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    write_gemma4_assistant(tmp_path / "assistant")
    (tmp_path / "assistant" / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    hub.add("org/assistant", tmp_path / "assistant")
    assert (folder_of(prepare("org/assistant")) / "model.safetensors").is_file()
    write_gemma4_assistant(tmp_path / "other", sliding_window=1)
    (tmp_path / "other" / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    hub.add("org/other", tmp_path / "other")
    assert "org/other/config.json: sliding_window must be at least 2" in error_of(prepare("org/other"))


def test_without_the_hub_the_cache_is_used(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/tiny", checkpoint)
    folder = folder_of(prepare("org/tiny"))
    hub.requests.clear()
    assert folder_of(prepare("org/tiny", HF_HUB_OFFLINE="1")) == folder
    assert hub.requests == []
    assert "does not hold revision v1 of org/tiny; unset HF_HUB_OFFLINE" in error_of(
        prepare("org/tiny", "--revision=v1", HF_HUB_OFFLINE="1")
    )
    hub.status = 503
    done = prepare("org/tiny")
    assert folder_of(done) == folder
    assert done.stderr.splitlines()[0] == f"{hub.url} does not answer; taking org/tiny from the cache"
    assert "has a failure (status 503); try again later" in error_of(prepare("org/other"))
    (folder / "model.safetensors").unlink()
    assert "only a part of org/tiny" in error_of(prepare("org/tiny", HF_HUB_OFFLINE="1"))


def test_the_cache_is_shared_with_other_tools(tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/tiny", checkpoint)
    script = "import huggingface_hub as h; print(h.snapshot_download('org/tiny'))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    theirs = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    hub.requests.clear()
    assert folder_of(prepare("org/tiny")) == Path(theirs.stdout.strip())
    assert hub.fetched() == []


def test_adapters_come_with_their_model(tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/tiny", checkpoint)
    written = write_adapter(tmp_path / "adapter", write_tiny(tmp_path / "reference", "llama"))
    (written / "optimizer.pt").write_bytes(b"x")
    hub.add("org/sql", written)
    options = ("org/tiny", "--enable-lora", "--lora-modules=sql=org/sql,chat=org/sql@v1")
    assert folder_of(prepare(*options)).name == COMMIT
    cached = tmp_path / "hf/hub/models--org--sql/snapshots" / COMMIT
    assert sorted(path.name for path in cached.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert read_adapter("x", str(cached)) == Adapter("x", str(cached), read_adapter("x", str(written)).digest)
    hub.requests.clear()
    folder_of(prepare(*options, HF_HUB_OFFLINE="1"))
    assert hub.requests == []
    assert "org/other is neither" in error_of(prepare("org/tiny", "--enable-lora", "--lora-modules=x=org/other"))


def test_what_is_no_adapter_is_refused_before_its_tensors(
    tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare
) -> None:
    hub.add("org/tiny", checkpoint)
    written = write_adapter(tmp_path / "adapter", write_tiny(tmp_path / "reference", "llama"))
    hub.add("org/huge", written, sizes={"adapter_model.safetensors": 9 << 30})
    (written / "adapter_model.safetensors").rename(written / "adapter_model.bin")
    hub.add("org/pickle", written)
    for name, reason in {"pickle": "never loaded", "tiny": "no adapter_config.json", "huge": "no adapter can"}.items():
        assert reason in error_of(prepare("org/tiny", "--enable-lora", f"--lora-modules=x=org/{name}"))
    assert not [name for name in hub.fetched() if name.startswith("adapter_model")]


@pytest.mark.parametrize(
    ("place", "adapter"),
    [
        ("org/name", HubAdapter("org/name")),
        ("org/name@v1.2", HubAdapter("org/name", "v1.2")),
        ("org/name@", None),
        ("/org/name", None),
        ("name", None),
        ("../name", None),
        ("org/name/file.gguf", None),
    ],
)
def test_forms_of_names_of_adapters(place: str, adapter: HubAdapter | None) -> None:
    assert parse_hub_adapter(place) == adapter


def test_a_cut_connection_is_resumed(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    received, content = 10 << 20, bytes(range(256)) * 48_000  # the library reads pieces of 10 MiB
    hub.add("org/tiny", checkpoint, cuts={"model.safetensors": received + 5}).files["model.safetensors"] = content
    folder = folder_of(prepare("org/tiny"))
    assert (folder / "model.safetensors").read_bytes() == content
    assert [ranges for _, _, ranges in hub.requests if ranges] == [f"bytes={received}-"]


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_download_ends_at_once_and_leaves_no_part(
    tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare, stop: signal.Signals, code: int
) -> None:
    hub.add("org/tiny", checkpoint, stalled="model.safetensors")
    assert prepare("org/tiny", stop=stop).returncode == code
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_shards_come_from_the_index(tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    (checkpoint / "model.safetensors").unlink()
    write_tiny(checkpoint, "llama", max_shard_size="100KB")
    shards = sorted(path.name for path in checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    repository = hub.add("org/sharded", checkpoint)
    repository.files["unlisted.safetensors"] = b""
    folder = folder_of(prepare("org/sharded"))
    assert sorted(path.name for path in folder.glob("*.safetensors")) == shards
    for name, wrong, said in (
        ("org/outside", "../other.safetensors", "must name safetensors files of its own folder"),
        ("org/absent", "model-9.safetensors", "org/absent lacks model-9.safetensors"),
    ):
        damaged = hub.add(name, checkpoint)
        index = {"weight_map": {"a": shards[0], "b": wrong}}
        damaged.files["model.safetensors.index.json"] = json.dumps(index).encode()
        hub.requests.clear()
        assert said in error_of(prepare(name))
        assert not any(file.endswith(".safetensors") for file in hub.fetched())


def test_what_cannot_be_served_is_refused_before_its_weights(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    (checkpoint / "config.json").write_text('{"architectures": ["GPT9ForCausalLM"]}')
    hub.add("org/unknown", checkpoint)
    said = error_of(prepare("org/unknown", "--model-impl=native"))
    assert said.startswith("org/unknown: architecture GPT9ForCausalLM is not supported")
    (checkpoint / "config.json").write_text('{"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}')
    hub.add("org/states", checkpoint)
    said = error_of(prepare("org/states"))
    assert said.startswith("org/states: Mamba2ForCausalLM keeps states besides keys and values")
    (checkpoint / "model.safetensors").unlink()
    hub.add("org/pickle", checkpoint)
    assert "weights only in a pickle format" in error_of(prepare("org/pickle"))
    hub.add("org/files", checkpoint).files["small.Q4_0.gguf"] = b""
    assert "its GGUF files are: org/files/small.Q4_0.gguf; name one of them" in error_of(prepare("org/files"))
    assert "has no file other.gguf" in error_of(prepare("org/files/other.gguf"))
    assert set(hub.fetched()) == {"config.json"}


def test_code_is_fetched_only_on_request(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    (checkpoint / "modeling_own.py").write_text("x = 1")
    hub.add("org/code", checkpoint)
    assert not (folder_of(prepare("org/code")) / "modeling_own.py").exists()
    assert (folder_of(prepare("org/code", "--trust-remote-code")) / "modeling_own.py").exists()


def test_a_full_disk_is_noticed_before_the_download(
    tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare
) -> None:
    hub.add("org/large", checkpoint, sizes={"model.safetensors": 10**18})
    said = error_of(prepare("org/large"))
    assert said.startswith("the download needs 1000000000.0 GB and ")
    assert said.endswith("choose a folder on another disk with HF_HUB_CACHE")
    assert str(tmp_path / "hf" / "hub") in said
    assert "model.safetensors" not in hub.fetched()


def test_names_that_lead_nowhere(hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/tiny", checkpoint)
    assert "org/tinny is neither a folder of this machine nor a model at" in error_of(prepare("org/tinny"))
    assert "org/tiny has no revision v9; choose a branch" in error_of(prepare("org/tiny", "--revision=v9"))
    assert "a revision is for models of the hub" in error_of(prepare(str(checkpoint), "--revision=v1"))
    said = error_of(prepare("org/tiny", HF_ENDPOINT="http://user:secret@127.0.0.1:1"))
    assert "cannot download org/tiny from http://127.0.0.1:1: the hub cannot be reached" in said
    hub.status = 200  # of answers without the JSON of a hub
    assert "does not answer like a Hugging Face hub; check whether" in error_of(prepare("org/tiny"))


def test_a_token_is_sent_and_never_shown(tmp_path: Path, hub: FakeHub, checkpoint: Path, prepare: Prepare) -> None:
    hub.add("org/gated", checkpoint, is_gated=True)
    page = f"{hub.url}/org/gated"
    assert f"accept its licence at {page}, and set HF_TOKEN" in error_of(prepare("org/gated"))
    wrong = prepare("org/gated", HF_TOKEN="hf_wrongwrong")
    assert "refuses access to org/gated (status 401); check that the token" in error_of(wrong)
    right = prepare("org/gated", HF_TOKEN=hub.token)
    folder_of(right)
    assert hub.tokens == {"Bearer hf_wrongwrong", f"Bearer {hub.token}"}
    assert "hf_wrongwrong" not in wrong.stderr
    assert hub.token not in right.stdout + right.stderr
    # The file that `hf auth login` writes does the same as the variable.
    (tmp_path / "login").mkdir()
    (tmp_path / "login" / "token").write_text(hub.token)
    folder_of(prepare("org/gated", HF_HOME=str(tmp_path / "login")))


def test_a_gguf_file_of_the_hub_is_converted(tmp_path: Path, hub: FakeHub, prepare: Prepare) -> None:
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "sub" / "tiny.gguf").write_bytes(b"GGUF of which the rest is missing")
    hub.add("org/files", tmp_path / "files")
    done = prepare("org/files/sub/tiny.gguf")
    assert "paceline: tiny.gguf is damaged or not a GGUF file" in done.stderr
    assert hub.fetched() == ["sub/tiny.gguf"]


def test_all_parts_of_a_gguf_file_are_fetched(tmp_path: Path, hub: FakeHub, prepare: Prepare) -> None:
    names = [f"sub/tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    (tmp_path / "files" / "sub").mkdir(parents=True)
    for name in names:
        (tmp_path / "files" / name).write_bytes(b"GGUF of which the rest is missing, " + name.encode())
    hub.add("org/files", tmp_path / "files")
    assert "paceline: tiny-00001-of-00002.gguf is damaged or not a GGUF file" in prepare(f"org/files/{names[0]}").stderr
    assert sorted(hub.fetched()) == names
    assert f"give {Path(names[0]).name}" in error_of(prepare(f"org/files/{names[1]}"))
    hub.add("org/part", tmp_path / "files").files.pop(names[1])
    assert f"org/part has no file {names[1]}" in error_of(prepare(f"org/part/{names[0]}"))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/Na_me-2.0", HubName("Org-1/Na_me-2.0")),
        ("org/name/sub/file.Q4_K_M.gguf", HubName("org/name", "sub/file.Q4_K_M.gguf")),
        ("name", None),
        ("/org/name", None),
        ("./org/name", None),
        ("../name", None),
        ("~/name", None),
        ("org/name/other", None),
        ("folder/file.gguf", None),
        ("org/name/../../x.gguf", None),
        ("org/..", None),
    ],
)
def test_forms_of_names(model: str, name: HubName | None) -> None:
    assert parse_hub_name(model) == name


def test_a_folder_of_this_machine_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name("org/name") is None


def test_a_file_beside_the_config_that_describes_quantized_weights_is_fetched(
    hub: FakeHub, checkpoint: Path, prepare: Prepare
) -> None:
    (checkpoint / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    hub.add("org/tiny", checkpoint)
    assert (folder_of(prepare("org/tiny")) / "quantize_config.json").is_file()


def test_weights_that_such_a_file_makes_unreadable_are_not_fetched(
    hub: FakeHub, checkpoint: Path, prepare: Prepare
) -> None:
    (checkpoint / "quant_config.json").write_text('{"w_bit": 3, "q_group_size": 128}')
    hub.add("org/tiny", checkpoint)
    assert "org/tiny/config.json: the checkpoint's weights are quantized as AWQ, in 3 bits" in error_of(
        prepare("org/tiny")
    )
    assert "model.safetensors" not in hub.fetched()
