"""An actor on a node without a store streams to the gateway of another, over a cable that is pulled
out.
"""

import subprocess
import time
from pathlib import Path

from cluster_support import Cluster
from gear_support import ROOT
from process_support import environment
from remote_support import openssl_certificate, write_token
from warm_python import PIPE, WarmProcess

LEARNS = """
import sys, threading
from remote_support import SCHEMA, Replay, TrajectoryWriter, assert_same, section, stored
from deepspeed_gear.remote.connection import read_token
from deepspeed_gear.remote.gateway import Gateway, read_certificate
token, chain, key, number = sys.argv[1:]
with Replay(section(), schemas={"main": SCHEMA}) as replay:
    writer = TrajectoryWriter.attach(section())
    gateway = Gateway(writer, read_token(token), "0.0.0.0", 4711, read_certificate(chain, key))
    is_over = lambda: replay.tables["main"].num_steps == int(number)
    thread = threading.Thread(target=gateway.run, args=(is_over,))
    thread.start()
    print("serves", flush=True)
    thread.join()
    assert_same(stored(replay), range(len(replay)))
    print("stored", replay.tables["main"].num_steps, flush=True)
"""
ACTS = """
import sys, time
from pathlib import Path
from remote_support import trajectory
from deepspeed_gear import RemoteWriter, SendOptions
token, chain = map(Path, sys.argv[1:])
options = {"sending": SendOptions(batch_bytes=1 << 16), "timeout_s": 40.0}
with RemoteWriter.connect("grpc+tls://10.77.0.1:4711", token=token, ca=chain, **options) as writer:
    for number in range(400):
        writer.add(trajectory(number))
        if number % 40 == 20:
            writer.flush()
            print("at", number, flush=True)
            time.sleep(0.2)
"""


def start(cluster: Cluster, node: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    inside = cluster.inits[node]
    return WarmProcess(["-c", program, *arguments], environment(), PIPE, cwd=ROOT, inside=inside)


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


def test_a_remote_actor_over_a_cable_that_is_pulled_out(cluster: Cluster, tmp_path: Path) -> None:
    """100,000 steps, five selections: TCP bridges short ones, calls have deadlines for the long
    one.
    """
    chain, key = openssl_certificate(tmp_path, "IP:10.77.0.1")
    token = write_token(tmp_path / "token")
    learner = start(cluster, 0, LEARNS, token, chain, key, 100_000)
    try:
        wait_for(learner, "serves")
        actor = start(cluster, 1, ACTS, token, chain)
        for cut in range(5):
            wait_for(actor, f"at {20 + 40 * cut}")
            cluster.link(1, "down")
            time.sleep(12.0 if cut == 2 else 0.5)
            cluster.link(1, "up")
        assert actor.wait() == 0
        wait_for(learner, "stored 100000")
        assert learner.wait() == 0
    finally:
        cluster.link(1, "up")
        learner.kill()
        learner.communicate()
