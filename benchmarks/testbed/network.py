"""Hosts as network namespaces, joined by veth pairs to a bridge, each link held at its rate by a token bucket.

    host 0: eth0 ══ port0 ┐
    host 1: eth0 ══ port1 ┤ br0          host:   10.77.x.y/16 on eth0; lo, held too where the file gives its rate
            ...           ┘ the switch   switch: a namespace of its own

With the bridge in its own namespace nothing stands among the machine's interfaces, no firewall rule of the machine sees
the traffic, and removing the namespaces removes everything.

Outgoing traffic is held on ``eth0``, incoming on the bridge's ``portN``. Why the figures below, each measured with one
socket at 50 Mbit/s to 10 Gbit/s:

*Burst*, what passes at once after a pause, is 1 ms of the rate: with 0.5 ms a late timer costs up to 7 % of the rate,
with 2 ms a transfer of 20 ms looks 10 % too fast (5 % with 1 ms). It is at least one frame: a larger one is dropped.

*Packets* the stack hands down are no larger than the burst (``gso_max_size``), and frames are jumbo: headers are 0.7 %
of them, 4.4 % of ordinary ones. The bucket counts headers, so its rate is that much higher and payload has the rate.

*Queues*: the bucket never drops, so a sender is kept from filling it otherwise. ``tcp_limit_output_bytes`` allows each
connection 2 ms of the rate in its own queue (8 ms and more without, which any small message behind it would wait).
The route's window bounds what several senders pile up before one receiver, at 16 ms each: enough for a rank that its
quota pauses for 10 ms.

*Congestion control* is reno, which every namespace may use: without losses it fills the window and stays there (bbr
reached 0.6 of 10 Gbit/s). Tail-loss probes are off: they take a busy machine for a loss.

With ranks held at 0.4 of a core, transfers of 200 ms then reach 0.99 to 1.00 of rates from 50 Mbit/s to 5 Gbit/s, and
0.96 of 10 Gbit/s. Other work on the machine shows all the same (at a load of 7 on two cores one transfer of 100 ms in
ten took up to twice its time, since the kernel's packet threads wait for a core): measure on a quiet one.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from autoplan.errors import UserError
from benchmarks.testbed.linux import NAMESPACE_FILES, NAMESPACES
from benchmarks.testbed.machine import command
from benchmarks.testbed.spec import TestbedSpec

INTERFACE = "eth0"  # a host's, inside its namespace
MTU_BYTES = 9000
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 32 with timestamps
PAYLOAD_BYTES = MTU_BYTES - 52
BURST_S = 1e-3
QUEUE_S = 2e-3
WINDOW_S = 16e-3
MIN_WINDOW_BYTES = 131_072
LIMIT_BYTES = 1 << 28  # of a bucket's queue: never reached, since windows are bounded
MAX_PACKET_BYTES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A held link. ``bytes_per_s`` is of payload."""

    bytes_per_s: float

    @property
    def burst_bytes(self) -> int:
        return max(round(self.bytes_per_s * BURST_S), MTU_BYTES + 100)

    @property
    def packet_bytes(self) -> int:
        """The largest packet handed to the link before it is cut into frames."""
        return min(self.burst_bytes, MAX_PACKET_BYTES)

    @property
    def window_bytes(self) -> int:
        return max(round(self.bytes_per_s * WINDOW_S), MIN_WINDOW_BYTES)

    @property
    def queue_bytes(self) -> int:
        return max(round(self.bytes_per_s * QUEUE_S), 4 * MTU_BYTES)

    def bucket(self, device: str) -> str:
        """The line for ``tc -batch``."""
        bits_per_s = self.bytes_per_s * 8 * (PAYLOAD_BYTES + HEADER_BYTES) / PAYLOAD_BYTES
        return (
            f"qdisc replace dev {device} root tbf rate {round(bits_per_s)}bit burst {self.burst_bytes} "
            f"limit {LIMIT_BYTES}"
        )


def address_of(host: int) -> str:
    """Address of a host's ``eth0``."""
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


class Network:
    """The namespaces of one testbed. ``namespaces`` is known before ``up``, so that it can be recorded first."""

    def __init__(self, name: str, spec: TestbedSpec) -> None:
        self.switch = f"{name}-switch"
        self.hosts = [f"{name}-h{host}" for host in range(spec.cluster.nodes)]
        self.inter = Rate(bytes_per_s=spec.inter_bytes_per_s)
        self.intra = Rate(bytes_per_s=spec.intra_bytes_per_s) if spec.intra_bytes_per_s is not None else None

    @property
    def namespaces(self) -> list[str]:
        return [*self.hosts, self.switch]

    def up(self) -> None:
        """Make the namespaces, the links and their buckets. Raises UserError with what ``ip`` or ``tc`` said."""
        for namespace in self.namespaces:
            command(["ip", "netns", "add", namespace])
        bridge = f"link add br0 mtu {MTU_BYTES} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        command(["ip", "-n", self.switch, "-batch", "-"], [bridge, "link set br0 up"])
        ports = [f"port{host}" for host in range(len(self.hosts))]
        pairs = [
            f"link add name {port} mtu {MTU_BYTES} type veth peer name {INTERFACE} mtu {MTU_BYTES} netns {namespace}"
            for port, namespace in zip(ports, self.hosts, strict=True)
        ]
        size = f"gso_max_size {self.inter.packet_bytes}"
        attached = [f"link set {port} master br0 up {size}" for port in ports]
        command(["ip", "-n", self.switch, "-batch", "-"], [*pairs, *attached])
        command(["tc", "-n", self.switch, "-batch", "-"], [self.inter.bucket(port) for port in ports])
        for host, namespace in enumerate(self.hosts):
            self._host_up(host, namespace)

    def _host_up(self, host: int, namespace: str) -> None:
        paths = ((f"/proc/sys/net/{path}", value) for path, value in self._settings())
        settings = "; ".join(f"if [ -e {path} ]; then echo {value} > {path}; fi" for path, value in paths)
        command(["ip", "netns", "exec", namespace, "sh", "-ec", settings])
        links = ["link set lo up", f"link set {INTERFACE} up gso_max_size {self.inter.packet_bytes}"]
        buckets = [self.inter.bucket(INTERFACE)]
        if self.intra is not None:
            links[0] += f" mtu {MTU_BYTES} gso_max_size {self.intra.packet_bytes}"
            buckets.append(self.intra.bucket("lo"))
        address, route = address_of(host), f"10.77.0.0/16 dev {INTERFACE} src {address_of(host)}"
        links += [
            f"address add {address}/16 dev {INTERFACE} noprefixroute",
            f"route add {route} window {self.inter.window_bytes}",
        ]
        command(["ip", "-n", namespace, "-batch", "-"], links)
        command(["tc", "-n", namespace, "-batch", "-"], buckets)
        self._name_hosts(host, namespace)

    def _name_hosts(self, host: int, namespace: str) -> None:
        """Names without a name server: each host's, and this machine's own as the host's, since programs ask for it."""
        names = [f"{address_of(other)} host{other}" for other in range(len(self.hosts))]
        # torch's store asks for the name of an IPv4 peer written as IPv6, and complains where there is none.
        mapped = [f"::ffff:{address_of(other)} host{other}-mapped" for other in range(len(self.hosts))]
        own = f"{address_of(host)} {socket.gethostname()}"
        lines = ["127.0.0.1 localhost", "::1 localhost", *names, *mapped, own]
        with suppress(OSError):  # a read-only /etc: names are a comfort, addresses do
            folder = NAMESPACE_FILES / namespace
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _settings(self) -> Iterator[tuple[str, int | str]]:
        slowest = min((rate for rate in (self.inter, self.intra) if rate is not None), key=lambda r: r.bytes_per_s)
        yield "ipv4/tcp_limit_output_bytes", slowest.queue_bytes
        yield "ipv4/tcp_congestion_control", "reno"
        yield "ipv4/tcp_early_retrans", 0
        yield "ipv4/tcp_slow_start_after_idle", 0
        yield f"ipv6/conf/{INTERFACE}/disable_ipv6", 1  # one address per host; absent where the kernel has no IPv6


def remove_namespaces(names: list[str]) -> None:
    """Remove network namespaces; absent ones are fine. Interfaces go with them."""
    for name in names:
        shutil.rmtree(NAMESPACE_FILES / name, ignore_errors=True)
        if (NAMESPACES / name).exists():
            with suppress(UserError):  # somebody else removed it meanwhile
                command(["ip", "netns", "delete", name])
            if (NAMESPACES / name).exists():
                command(["ip", "netns", "delete", name])
