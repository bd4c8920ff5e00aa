"""The GPU's kernels as machine code, and the library that holds them, where there need be no GPU.

Needs libringlet_cuda.so, which an nvcc built. The machine code also needs cuobjdump and nvdisasm: the toolkit's, or
those of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
import shutil

import pytest

from programs import printed

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = pathlib.Path(
    os.environ.get("RINGLET_CUDA_LIBRARY") or ROOT / "python" / "ringlet" / "libringlet_cuda.so"
).resolve()
ARCHITECTURES = ("sm_80", "sm_90")

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no libringlet_cuda.so: the build found no nvcc")


def tool(name):
    """The toolkit's or the package's; skips the test where there is neither."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [str(file.locate()) for file in files if file.name == name]
    found = shutil.which(name) or next(iter(packaged), None)
    if found is None:
        pytest.skip(f"no {name}: pip install nvidia-cuda-{name}")
    return pathlib.Path(found).resolve()


@functools.cache
def dump(*options):
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    environment = {**os.environ, "PATH": f"{nvdisasm.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    return printed(cuobjdump, *options, LIBRARY, timeout=300, env=environment)


@functools.cache
def machine_code(architecture):
    """The instructions of every kernel, by mangled name."""
    text = dump("-sass", "-arch", architecture)
    parts = re.split(r"\n\s*Function : (\S+)\n", text)
    code = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: body for name, body in code.items() if "_kernel" in name}


def opcodes(body):
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", body)


def named(name):
    """As people write it: 'Float16 Sums 2'."""
    parts = re.findall(r"\d+(Float\d+|BFloat16|E4m3fn|E5m2|Integer|Complex|Sums|Products|Arithmetic|Bitwise)", name)
    return " ".join([*parts, *re.findall(r"Li(\d+)E", name)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_move_16_bytes_at_a_time_and_nothing_through_local_memory(architecture):
    code = machine_code(architecture)
    # Sums of four floats; any arithmetic of these, of two float8s and of five integers; bitwise; two complex products.
    instances = 4 + (4 + 2 + 5) + 1 + 2
    assert sum("reduce_kernel" in name for name in code) == 2 * instances  # for two sources and for many
    assert sum("pull_kernel" in name for name in code) == instances
    wrong = []
    for name, body in code.items():
        used = opcodes(body)
        assert len(used) > 20, f"{name}: the disassembly was not understood"
        loads = [op for op in used if op.startswith("LDG") and "128" in op]
        stores = [op for op in used if op.startswith("STG") and "128" in op]
        local = [op for op in used if op.startswith(("LDL", "STL"))]
        if not loads or not stores or local:
            wrong.append(f"{named(name)}: {len(loads)} loads, {len(stores)} stores of 16 bytes, local: {set(local)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pull_kernel_waits_for_several_peers_memory_at_once(architecture):
    """Two packs of four sources are on their way before the first two are added; a block has 512 threads."""
    code = machine_code(architecture).items()
    floats = [body for name, body in code if "pull_kernel" in name and named(name).startswith("Float32")]
    assert len(floats) == 2  # sums, and any arithmetic
    for body in floats:
        on_their_way = most = 0
        for op in opcodes(body):
            on_their_way += op.startswith("LDG") and "128" in op
            if op.startswith(("FADD", "FMUL", "FMNMX", "STG")):
                on_their_way = 0
            most = max(most, on_their_way)
        assert most >= 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_progress_is_acquired_and_released_across_devices(architecture):
    """An acquire: a strong load, and before anything depends on it the cache is emptied. A release: a fence, then a
    strong store. What orders nothing: three looks at the start and one at the end, and three in each wait at whether
    this rank, a peer or the host gave up. A pull kernel has three waits in its code, the all-to-all's has five."""
    kernels = {name: body for name, body in machine_code(architecture).items() if re.search("pull|exchange", name)}
    assert sum("exchange_kernel" in name for name in kernels) == 1
    for name, body in kernels.items():
        waits = 5 if "exchange_kernel" in name else 3
        used = " ".join(opcodes(body))
        strong = re.findall(r"LDG?\.E\.64\.STRONG\.SYS((?: (?!BRA|BSSY|LD|EXIT)\S+)*)", used)
        acquired = ["CCTL.IVALL" in until_next.split() for until_next in strong]
        assert (acquired.count(True), acquired.count(False)) == (waits + 1, 4 + 3 * waits), named(name)
        stores = re.findall(r"((?:\S+ ){4})STG?\.E\.64\.STRONG\.SYS", used)
        assert len(stores) >= 10 and all("MEMBAR" in before and ".SYS" in before for before in stores), named(name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packets_with_flags_are_whole_and_on_their_way_together(architecture):
    """A peer must not see a flag without the message: one access has both. Eight ranks' packets are loaded before the
    first is looked at. Fences are only where a block gives up, or tells another kernel of its call."""
    kernels = [body for name, body in machine_code(architecture).items() if "low_latency" in name]
    assert len(kernels) == 3
    for body in kernels:
        strong = " ".join(op for op in opcodes(body) if re.match(r"(LDG?|STG?|FADD|MEMBAR)\b", op))
        assert len(re.findall(r"STG?\.E\.128\.STRONG\.SYS", strong)) == 1
        loads = r"(?:LDG?\.E\.128\.STRONG\.SYS ?){8}"
        assert len(re.findall(loads, strong)) == len(re.findall(r"LDG?\.E\.128\.STRONG\.SYS", strong)) / 8 == 1
        between = re.search(r"STG?\.E\.128\.STRONG\.SYS(.*?)LDG?\.E\.128", strong)
        assert between and "MEMBAR" not in between[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_have_no_stack(architecture):
    """A stack is where registers are spilt to and where arrays with computed indices lie."""
    usage = re.findall(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump("-res-usage"))
    kernels = [(name, int(regs), int(stack), int(local)) for name, regs, stack, local in usage if "_kernel" in name]
    assert len(kernels) == len(ARCHITECTURES) * len(machine_code(architecture))
    assert not [(named(name), stack, local) for name, _, stack, local in kernels if stack or local]
    # Two blocks of 256 threads fit a processor, or one of a pull kernel's 512.
    assert all(regs <= 128 for _, regs, _, _ in kernels)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_product_is_rounded_before_it_is_added(architecture):
    """Or the bits would not be the host's. (Quotients are made of fused steps that round as one.)"""
    products = {name: opcodes(body) for name, body in machine_code(architecture).items() if "Complex" in name}
    assert len(products) == 6
    for name, used in products.items():
        assert any(op.startswith(("FMUL", "DMUL")) for op in used), named(name)
        assert not any(op.startswith(("FFMA", "DFMA")) for op in used), named(name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float16_is_converted_by_the_devices_own_instructions(architecture):
    halves = {
        name: body
        for name, body in machine_code(architecture).items()
        if "7Float16" in name and "8BFloat16" not in name
    }
    assert len(halves) == 2 * 3 + 1
    for name, body in halves.items():
        assert any(op.startswith(("HADD2.F32", "F2F", "F2FP")) for op in opcodes(body)), named(name)


def test_newer_devices_get_code_they_can_compile():
    assert re.findall(r"PTX file\s+\d+: \S*sm_90\S*", dump("-lptx"))
    assert not re.findall(r"PTX file\s+\d+: \S*sm_80\S*", dump("-lptx"))


class Table(ctypes.Structure):
    """The part of RingletCudaDevice (csrc/cuda/device_library.h) that is called here."""

    _fields_ = (
        ("bytes", ctypes.c_size_t),
        ("serves", ctypes.c_char_p),
        ("reduce", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint8, ctypes.c_uint8, ctypes.c_void_p)),
        ("most_sources", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("copy", "pull", "pull_together", "exchange", "low_latency")),
        ("load", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("upload", "download", "use", "identity")),
        *((name, ctypes.c_void_p) for name in ("share", "open", "close", "reach")),
        ("allocate", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)),
        *((name, ctypes.c_void_p) for name in ("release", "allocate_mapped", "release_mapped")),
        *((name, ctypes.c_void_p) for name in ("create_stream", "destroy_stream", "create_event")),
        *((name, ctypes.c_void_p) for name in ("destroy_event", "record", "wait", "finished", "capturing")),
        ("explain", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)),
    )


def test_the_table_opens_and_without_a_driver_refuses_in_words():
    library = ctypes.CDLL(str(LIBRARY))
    library.ringlet_cuda_device.restype = ctypes.POINTER(Table)
    table = library.ringlet_cuda_device().contents
    assert table.bytes == ctypes.sizeof(Table)
    assert table.most_sources == 128 and table.serves == b"cuda"
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU here, which refuses nothing")
    memory = ctypes.c_void_p()
    refused = table.allocate(ctypes.byref(memory), 256)
    assert refused != 0 and not memory.value
    assert re.search(r"driver|no CUDA-capable device", table.explain(refused).decode())
