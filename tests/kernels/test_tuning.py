"""Which tile a launch takes: the table, what fits, what a search found, and files that cannot be read."""

import json
import warnings

import pytest
import torch
from triton.runtime.errors import OutOfResources

from flashbob.kernels import launch as launching
from flashbob.kernels import tuning
from flashbob.kernels.common import Problem

DEVICE = torch.device("cuda", 0)
FORM = ("row_pass", 64, torch.bfloat16, DEVICE, 1000)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """An A100 that nobody needs to have."""
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100 80GB/PCIe")
    monkeypatch.setenv("FLASHBOB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHBOB_AUTOTUNE", raising=False)
    tuning._stored.cache_clear()
    yield
    tuning._stored.cache_clear()


def search(monkeypatch, milliseconds):
    """A search in which a tile takes what `milliseconds` says of it."""
    launched = []

    def median_ms(call):
        call()
        return milliseconds(launched[-1])

    def launch(tile):
        if tile["BLOCK_M"] == 128:
            raise OutOfResources(200_000, 100_000, "shared memory")
        launched.append(tile)

    monkeypatch.setattr(tuning, "_median_ms", median_ms)
    tuning.search(*FORM, launch)
    return launched


def test_a_search_is_stored_and_found_by_the_next_process(monkeypatch):
    monkeypatch.setenv("FLASHBOB_AUTOTUNE", "1")
    shipped = tuning.tiles(*FORM)
    assert tuning.searches(*FORM)
    wanted = {"BLOCK_M": 64, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
    assert shipped[0] != wanted
    launched = search(monkeypatch, lambda tile: 1.0 if tile == wanted else 2.0 + tile["BLOCK_N"])
    assert shipped[0] in launched and len(launched) > 10
    for _ in range(2):
        assert tuning.tiles(*FORM) == [wanted, *shipped]
        assert not tuning.searches(*FORM)
        tuning._stored.cache_clear()  # another process
        monkeypatch.delenv("FLASHBOB_AUTOTUNE", raising=False)
    # Lengths share a tile up to the next power of two; other dtypes, passes and head dimensions have their own.
    for other in [
        (*FORM[:4], 1025),
        ("column_pass", *FORM[1:]),
        ("row_pass", 128, *FORM[2:]),
        (*FORM[:2], torch.float16, *FORM[3:]),
    ]:
        assert tuning.tiles(*other)[0] != wanted
    assert tuning.tiles(*FORM[:4], 600)[0] == wanted


def test_without_the_variable_nothing_is_searched():
    assert not tuning.searches(*FORM)


def test_baselines_and_interpreted_kernels_are_not_searched(monkeypatch):
    monkeypatch.setenv("FLASHBOB_AUTOTUNE", "1")
    assert not tuning.searches("baseline_rows", *FORM[1:])  # atomics: a second launch would add to the first
    monkeypatch.setattr(tuning, "INTERPRETED", True)
    assert not tuning.searches(*FORM)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"row_pass d=64 bfloat16 N=1024": {"BLOCK_M": "64"}}', '{"a": 3}']
)
def test_a_file_that_cannot_be_read_is_left_out_with_one_warning(content):
    path = tuning._path(DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(UserWarning, match="is no file of tiles"):
        tiles = tuning.tiles(*FORM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.tiles(*FORM) == tiles


def test_a_folder_that_cannot_be_written_keeps_the_result_in_the_process(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHBOB_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="could not be written"):
        search(
            monkeypatch,
            lambda tile: tile["BLOCK_N"] + tile["num_warps"] + tile["num_stages"] + tile["BLOCK_M"] / 100,
        )
    assert tuning.tiles(*FORM)[0]["BLOCK_N"] == 16


def test_the_file_is_whole_or_not_there(monkeypatch):
    search(monkeypatch, lambda tile: 1.0)
    (file,) = tuning._path(DEVICE).parent.iterdir()
    assert file.name.startswith("tiles-A100-80GB-PCIe-triton-") and json.loads(file.read_text())


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_device_has_tiles_for_every_head_dimension(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for pass_name in (*tuning.SEARCHED, "baseline_rows"):
        for head_dim in (16, 64, 80, 128, 256):
            *_, last = tuning.tiles(pass_name, head_dim, dtype, DEVICE, 4096)
            assert (last["BLOCK_M"], last["BLOCK_N"], last["num_stages"]) == (16, 16, 1)


class Kernel:
    arg_names = ("q_ptr", "BLOCK_M")

    def __init__(self, largest):
        self.largest, self.ran = largest, []

    def __getitem__(self, grid):
        def first(**arguments):
            if arguments["BLOCK_M"] > self.largest:
                raise OutOfResources(arguments["BLOCK_M"], self.largest, "shared memory")
            self.ran.append(arguments["BLOCK_M"])
            return {(*grid, 1, 1): lambda *values: self.ran.append(values[1])}

        return first


@pytest.fixture
def problem(monkeypatch):
    from flashbob.kernels import common

    monkeypatch.setattr(common, "check_device", lambda device: None)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    launching._PLANS.clear()
    q = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16)
    yield Problem.of(q, q, scale=1.0), {"q_ptr": q}
    launching._PLANS.clear()


def test_a_tile_that_does_not_fit_gives_way_to_a_smaller_one(problem):
    problem, tensors = problem
    kernel = Kernel(largest=16)
    for _ in range(2):
        launching.launch(kernel, problem, tensors, lambda tile: (1, dict(tile)), "row_pass")
    assert kernel.ran == [16, 16]


def test_when_no_tile_fits_the_error_names_the_pass_and_the_head_dimension(problem):
    problem, tensors = problem
    with pytest.raises(
        RuntimeError, match=r"no tile of row_pass for head dimension 64 and torch.bfloat16 fits"
    ):
        launching.launch(Kernel(largest=8), problem, tensors, lambda tile: (1, dict(tile)), "row_pass")
