from pathlib import Path

from paceline.core.model_folder import model_digest, read_model_files


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(content)
    return path


def test_config_and_tokenizer_make_the_model_and_nothing_else_does(tmp_path: Path) -> None:
    base = {"config": "{}", "tokenizer": "[]"}
    digest = model_digest(folder(tmp_path / "one", **base))
    assert model_digest(folder(tmp_path / "same", **base, generation_config="{}")) == digest
    others = [{**base, "config": "{ }"}, {**base, "tokenizer": "[ ]"}, {"config": "{}"}, {"config": "[]"}, {}]
    digests = {model_digest(folder(tmp_path / str(index), **files)) for index, files in enumerate(others)}
    assert len(digests | {digest}) == len(others) + 1


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    base = {"config": "{}", "tokenizer": "[]"}
    ours = read_model_files(folder(tmp_path / "ours", **base))
    for index, (changed, named) in enumerate(
        [
            ({"config": "{ }"}, "config.json"),
            ({"tokenizer": ""}, "tokenizer.json"),
            ({"config": "", "tokenizer": ""}, "config.json and tokenizer.json"),
        ]
    ):
        theirs = read_model_files(folder(tmp_path / str(index), **{**base, **changed}))
        assert ours.difference(theirs.digests) == named
    assert ours.difference({}) == "config.json or tokenizer.json"  # an earlier release tells no digests of files


def test_content_does_not_move_from_file_to_file(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", config="ab", tokenizer="c")
    other = folder(tmp_path / "other", config="a", tokenizer="bc")
    assert model_digest(one) != model_digest(other)
