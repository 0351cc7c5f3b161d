"""GPUs that are not there, are too old, are shared, or cannot reach each other: one clear refusal each, in time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from raycache import LLM
from raycache.errors import ConfigError, RankLostError
from raycache.parallel.context import Store, build_group, group_handles
from raycache.parallel.devices import require_gpus
from raycache.parallel.sharding import Split

pytestmark = pytest.mark.gpu

HOST = "127.0.0.1"


CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def said_by(script: str, **environment: str) -> str:
    """What a process of its own says that ends within a minute."""

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


REQUIRE = """
    from raycache.errors import ConfigError
    from raycache.parallel.devices import require_gpus
    try:
        require_gpus(1)
    except ConfigError as refused:
        print("refused:", refused)
"""


def fake_driver(folder: Path, *, version: int) -> dict[str, str]:
    """A driver library that knows nothing but its version, and the environment in which it is the one that is found."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source = (
        f"int cuInit(unsigned flags) {{ return 0; }} int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}"
    )
    (folder / "driver.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_a_driver_that_is_too_old_is_told_with_both_versions(tmp_path: Path) -> None:
    said = said_by(REQUIRE, **fake_driver(tmp_path, version=11040))
    assert "refused: 1 GPU asked for" in said and "goes up to CUDA 11.4, too old" in said
    assert f"built for CUDA {torch.version.cuda}" in said and "Warning" not in said


def test_a_machine_without_a_driver_is_told_as_such(tmp_path: Path) -> None:
    assert "there is no NVIDIA driver" in said_by(REQUIRE, **fake_driver(tmp_path, version=0))


def test_gpus_that_are_hidden_are_told_as_such(model: Path) -> None:
    script = f"""
        from raycache import LLM
        from raycache.errors import ConfigError
        try:
            LLM({str(model)!r}, device="cuda", dummy_weights=True)
        except ConfigError as refused:
            print("refused:", refused)
    """
    said = said_by(script, CUDA_VISIBLE_DEVICES="")
    assert "refused: 1 GPU asked for" in said and "CUDA_VISIBLE_DEVICES" in said


def test_more_ranks_than_gpus_are_refused(model: Path) -> None:
    there = torch.cuda.device_count()
    require_gpus(there)
    with pytest.raises(ConfigError, match=f"64 GPUs requested, but only {there} found; use a smaller split"):
        LLM(str(model), device="cuda", dummy_weights=True, cp=64)


def test_two_ranks_on_one_gpu_are_refused_when_they_meet() -> None:
    store = Store(HOST)
    handles = group_handles(Split(tp=2), backend="nccl", store=store.address, epoch=1, timeout_s=20)

    def join(rank: int) -> str:
        with pytest.raises(ConfigError) as refused:
            build_group(handles["tp.0"], member=rank, epoch=1, host=HOST, device=torch.device("cuda:0"))
        return str(refused.value)

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(join, range(2)))
    assert time.monotonic() - begin < 10
    assert said[0] == said[1] and "rank 0 on 127.0.0.1 and rank 1 on 127.0.0.1 compute on the same GPU" in said[0]


def test_a_rank_that_does_not_come_is_missed_by_name() -> None:
    store = Store(HOST)
    handles = group_handles(Split(tp=2), backend="nccl", store=store.address, epoch=1, timeout_s=2)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 .* did not join its group") as lost:
        build_group(handles["tp.0"], member=0, epoch=1, host=HOST, device=torch.device("cuda:0"))
    assert lost.value.rank == 1 and time.monotonic() - begin < 10


CONNECT = """
    import os
    import torch
    from torch.distributed import PrefixStore, ProcessGroupNCCL, TCPStore
    from raycache.errors import RankLostError
    from raycache.parallel.context import Store, connect, group_handles
    from raycache.parallel.devices import Peer
    from raycache.parallel.sharding import Split

    store = Store("127.0.0.1")
    handle = group_handles(Split(tp=2), backend="nccl", store=store.address, epoch=1, timeout_s=5)["tp.0"]
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    tcp = PrefixStore("1/world", TCPStore(*store.address, is_master=False))
    group = ProcessGroupNCCL(tcp, 0, 2, ProcessGroupNCCL.Options())
    try:
        connect(group, device, handle=handle, me=0, peers=[Peer(1, "10.0.0.7", "GPU-1")])
    except RankLostError as lost:
        print("lost:", lost, flush=True)

    os._exit(0)  # NCCL still waits
"""


def test_a_peer_that_nccl_does_not_reach_is_named_at_the_deadline() -> None:
    begin = time.monotonic()
    said = said_by(CONNECT)
    assert time.monotonic() - begin < 45
    assert "cannot connect it to rank 1 on 10.0.0.7: no answer within 5 s" in said and "NCCL_SOCKET_IFNAME" in said


def test_a_network_interface_that_is_not_there_is_told_at_once() -> None:
    said = said_by(CONNECT, NCCL_SOCKET_IFNAME="absent0")
    assert "cannot connect it to rank 1 on 10.0.0.7" in said and "no answer within" not in said
    assert "NCCL_SOCKET_IFNAME" in said


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_a_split_whose_ranks_find_no_network_does_not_start(model: Path) -> None:
    script = f"""
        from raycache import LLM
        from raycache.errors import RankLostError
        if __name__ == "__main__":
            try:
                LLM({str(model)!r}, device="cuda", dummy_weights=True, tp=2, rank_timeout_s=20)
            except RankLostError as lost:
                print("lost:", lost)
    """
    assert "set NCCL_SOCKET_IFNAME" in said_by(script, NCCL_SOCKET_IFNAME="absent0")
