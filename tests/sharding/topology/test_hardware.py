"""A folder with some of sysfs's files stands for a machine."""

import os
from pathlib import Path

import pytest

from sharding.topology.hardware import cpu_list, read_hardware
from sharding.topology.topology import Topology

A_GPU = {"class": "0x030200", "vendor": "0x10de"}
A_CONSOLE = {"class": "0x030000", "vendor": "0x1a03"}
A_NIC = {"class": "0x020000", "vendor": "0x15b3"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def add_numa(sysfs: Path, **cpus: str) -> None:
    for node, text in cpus.items():
        write(sysfs / "devices/system/node" / node / "cpulist", text)
    write(sysfs / "devices/system/node/online", "0")


def add_pci(sysfs: Path, address: str, files: dict[str, str], numa_node: int | None) -> Path:
    """As the kernel does it: the device's folder, and a link to it from the list of all devices."""
    device = sysfs / "devices/pci0000:00" / address
    told = {} if numa_node is None else {"numa_node": str(numa_node)}
    for name, text in (files | told).items():
        write(device / name, text)
    link = sysfs / "bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    return device


def add_nic(sysfs: Path, name: str, device: Path | None) -> None:
    interface = (device or sysfs / "devices/virtual") / "net" / name
    write(interface / "mtu", "1500")
    if device is not None:
        (interface / "device").symlink_to(device)
    link = sysfs / "class/net" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(interface)


@pytest.fixture
def two_sockets(tmp_path):
    """Two NUMA nodes, two GPUs and a network card on each, and a console."""
    add_numa(tmp_path, node0="0-3,8-11", node1="4-7,12-15")
    for socket in (0, 1):
        for slot in (0, 1):
            add_pci(tmp_path, f"0000:{socket + 1}{slot}:00.0", A_GPU, socket)
        nic = add_pci(tmp_path, f"0000:{socket + 1}8:00.0", A_NIC, socket)
        add_nic(tmp_path, f"eth{socket}", nic)
    add_pci(tmp_path, "0000:03:00.0", A_CONSOLE, 0)
    add_nic(tmp_path, "lo", None)
    return tmp_path


def facts(sysfs, **options):
    return {name: fact.value for name, fact in read_hardware(str(sysfs), **options).items()}


def reason(sysfs, name, **options):
    fact = read_hardware(str(sysfs), **options)[name]
    assert fact.value is None
    return fact.why_unknown


def test_devices_are_counted_without_consoles_and_virtual_interfaces(two_sockets):
    found = facts(two_sockets, cpus=[0])
    assert (found["num_numa_nodes"], found["num_gpus"], found["num_nics"]) == (2, 4, 2)


@pytest.mark.parametrize(("cpus", "node"), [([0, 11], 0), ([12], 1), (range(4, 8), 1)])
def test_a_bound_process_is_on_the_numa_node_of_its_cpus(two_sockets, cpus, node):
    assert facts(two_sockets, cpus=cpus)["numa_node"] == node


def test_a_process_that_may_use_both_sockets_is_on_neither(two_sockets):
    assert "not bound: it may use CPUs of NUMA nodes 0, 1" in reason(two_sockets, "numa_node", cpus=range(16))


def test_cpus_that_sysfs_does_not_know_give_no_numa_node(two_sockets):
    assert "no NUMA node in sysfs has" in reason(two_sockets, "numa_node", cpus=[99])
    assert "no NUMA node in sysfs has" in reason(two_sockets, "numa_node", cpus=[])


@pytest.mark.parametrize("address", ["0000:21:00.0", "00000000:21:00.0", "21:00.0", " 0000:21:00.0\n"])
def test_a_gpu_given_by_its_pci_address_has_its_numa_node(two_sockets, address):
    assert facts(two_sockets, cpus=[0], gpu=address)["gpu_numa_node"] == 1


def test_addresses_are_compared_in_small_letters(tmp_path):
    add_pci(tmp_path, "0001:af:00.0", A_GPU, 3)
    assert facts(tmp_path, gpu="00000001:AF:00.0")["gpu_numa_node"] == 3


def test_which_of_several_devices_is_not_guessed(two_sockets):
    assert "4 GPUs on NUMA nodes 0, 1, and which one" in reason(two_sockets, "gpu_numa_node")
    assert "2 network cards on NUMA nodes 0, 1" in reason(two_sockets, "nic_numa_node")


def test_a_gpu_that_is_not_there_is_not_known(two_sockets):
    assert "no PCI device 0000:99:00.0" in reason(two_sockets, "gpu_numa_node", gpu="0000:99:00.0")
    for wrong in ("nonsense", "", "17:00", "../../x:00.0"):
        with pytest.raises(ValueError, match="gpu must be a PCI address"):
            read_hardware(str(two_sockets), gpu=wrong)


def test_devices_that_all_have_one_numa_node_have_that_one(tmp_path):
    for slot in (1, 2):
        add_pci(tmp_path, f"0000:0{slot}:00.0", A_GPU, 1)
        add_nic(tmp_path, f"eth{slot}", add_pci(tmp_path, f"0000:1{slot}:00.0", A_NIC, 0))
    found = facts(tmp_path)
    assert (found["gpu_numa_node"], found["nic_numa_node"]) == (1, 0)


def test_minus_one_and_missing_files_are_unknown(tmp_path):
    add_pci(tmp_path, "0000:01:00.0", A_GPU, -1)
    add_pci(tmp_path, "0000:02:00.0", A_GPU, None)
    assert "tells the NUMA node of no GPU" in reason(tmp_path, "gpu_numa_node")
    assert "tells no NUMA node of GPU" in reason(tmp_path, "gpu_numa_node", gpu="0000:01:00.0")
    add_pci(tmp_path, "0000:03:00.0", A_GPU, 0)
    assert "NUMA nodes 0 and unknown ones" in reason(tmp_path, "gpu_numa_node")


def test_a_virtio_card_has_the_numa_node_of_the_pci_device_above_it(tmp_path):
    virtio = add_pci(tmp_path, "0000:05:00.0", {"class": "0x020000"}, 1) / "virtio2"
    virtio.mkdir()
    add_nic(tmp_path, "eth0", virtio)
    assert facts(tmp_path)["nic_numa_node"] == 1


def test_a_file_above_sysfs_is_never_read(tmp_path):
    write(tmp_path / "numa_node", "5")
    sysfs = tmp_path / "sys"
    add_pci(sysfs, "0000:05:00.0", A_GPU, None)
    assert "tells the NUMA node of no GPU" in reason(sysfs, "gpu_numa_node")


@pytest.mark.parametrize(
    ("kind", "vendor", "counts"),
    [
        ("0x030000", "0x10de", True),  # a GeForce
        ("0x030000", "0x1002", True),  # a Radeon
        ("0x030000", "0x8086", False),  # graphics of a CPU
        ("0x038000", "0x1002", True),  # MI200
        ("0x038000", "0x8086", True),  # Data Center GPU Max
        ("0x120000", "0x1002", True),  # MI300
        ("0x120000", "0x1da3", True),  # Gaudi
        ("0x010802", "0x10de", False),  # a disk
    ],
)
def test_gpus_are_told_by_pci_class_and_vendor(tmp_path, kind, vendor, counts):
    add_pci(tmp_path, "0000:01:00.0", {"class": kind, "vendor": vendor}, 0)
    assert facts(tmp_path)["num_gpus"] == int(counts)


def test_an_empty_sysfs_gives_no_fact_and_a_reason_for_each(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        found = read_hardware(str(place), cpus=[0])
        assert all(fact.value is None and fact.why_unknown for fact in found.values())


def test_a_damaged_cpu_list_gives_no_numa_nodes(tmp_path):
    add_numa(tmp_path, node0="0-x")
    assert facts(tmp_path, cpus=[0])["num_numa_nodes"] is None


def test_a_node_of_memory_only_is_counted_and_has_no_cpus(tmp_path):
    add_numa(tmp_path, node0="0-1", node1="")
    found = facts(tmp_path, cpus=[0, 1])
    assert (found["num_numa_nodes"], found["numa_node"]) == (2, 0)


def test_the_system_is_asked_for_its_cpus(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    add_numa(tmp_path, node7=",".join(map(str, cpus)))
    assert facts(tmp_path)["numa_node"] == 7


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-2,5\n", {0, 1, 2, 5}), ("8-9,0-1", {0, 1, 8, 9})]
)
def test_cpu_lists_are_the_kernels(text, cpus):
    assert cpu_list(text) == cpus


def test_this_machines_own_sysfs_can_be_read():
    for name, fact in read_hardware().items():
        assert (fact.value is None) == bool(fact.why_unknown), name


def test_a_topology_has_the_facts_and_their_reasons(two_sockets):
    found = Topology.detect({}, sysfs=str(two_sockets), host="h", cpus=[5], gpu="0000:10:00.0")
    assert (found.numa_node, found.gpu_numa_node, found.nic_numa_node) == (1, 0, None)
    assert (found.num_numa_nodes, found.num_gpus, found.num_nics) == (2, 4, 2)
    assert found.numa_nodes_of_ranks == (1,)
    assert "2 network cards" in found.why_unknown["nic_numa_node"]
    assert "numa_node" not in found.why_unknown
