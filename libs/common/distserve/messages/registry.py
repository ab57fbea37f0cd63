"""What a service says of itself."""

import msgspec

from distserve.messages.base import Message, Part, Priority, Role, WorkerStatus
from distserve.messages.leases import Endpoint, KVLayout


class PassSpeed(Part, frozen=True):
    """What a forward pass takes, as fitted to those that were (worker/pass_model.py): pass_s + token_s for each token
    in it + pair_s for each pair of a token and one that it attends to. All 0: not known yet."""

    pass_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.pass_s + self.token_s > 0

    def seconds(self, num_tokens: float, num_pairs: float = 0.0) -> float:
        """Of one pass."""
        return self.pass_s + self.token_s * num_tokens + self.pair_s * num_pairs

    def prefill_s(self, num_new: int, num_cached: int, pass_tokens: int) -> float:
        """To compute num_new tokens that follow num_cached, pass_tokens (over 0) in a pass at most."""
        num_passes = -(-num_new // pass_tokens)
        return num_passes * self.pass_s + self.seconds(num_new, pairs(num_new, num_cached)) - self.pass_s


def pairs(num_new: int, num_cached: int) -> float:
    """Of a token and one that it attends to, for num_new tokens that follow num_cached."""
    return num_new * (num_cached + num_new / 2)


class Backlog(msgspec.Struct, frozen=True, array_like=True):
    """Work of a prefill worker's queue that is done before a newcomer's whose first token is due within `due_s`.
    Several of them make steps: each holds what the ones before it hold."""

    due_s: float  # from the message on; inf: a newcomer that was promised nothing
    priority: Priority
    work_s: float  # seconds of computing


class Load(Part, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    tokens_per_s: float = 0.0
    max_num_seqs: int = 0  # sequences that a decode worker runs at once; 0: not one
    speed: PassSpeed = PassSpeed()  # of passes over prompts
    pass_tokens: int = 0  # of prompts, in one pass
    backlog: list[Backlog] = []
    step_s: float = 0.0  # a decode step, as it is now; 0: not known yet
    num_preemptions: int = 0  # since the worker's start


class WorkerInfo(Message, frozen=True):
    """A service's entry in the registry, renewed by every heartbeat."""

    worker_id: str
    role: Role
    model: str = ""  # served name
    status: WorkerStatus = "warming"
    reasons: list[str] = []  # why it is degraded
    version: str = ""
    host_key: str = ""
    pid: int = 0
    layout: KVLayout | None = None
    endpoints: list[Endpoint] = []
    transports: list[str] = []  # kinds that it can send or take KV by
    transports_in_use: list[str] = []  # kinds that have carried some between it and the peers that are there
    http_url: str = ""  # what its /metrics and /health are under
    max_model_len: int = 0  # tokens, prompt and output together
    eos_token_ids: list[int] = []
    colocated: bool = False  # a decode worker that takes SubmitRequest
    load: Load = Load()
    beat: int = 0
