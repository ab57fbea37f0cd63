"""What the prompts that wait here come to, in seconds: for admission, and for what the registry is told."""

import math

from distserve.engine.sequence import Sequence
from distserve.messages import Backlog, PassSpeed, Slo
from distserve.worker.due import due_at
from distserve.worker.prefixes import Prefixes
from distserve_decode.forecast import Queue, Task, admit
from distserve_decode.scheduler import Scheduler


class Prospects:
    """As the scheduler stands, and by the passes that were. While they don't tell enough of prompts, or not of late,
    nothing is foretold and nobody refused (PassModel.advertised)."""

    def __init__(self, scheduler: Scheduler, prefixes: Prefixes) -> None:
        self._scheduler = scheduler
        self._prefixes = prefixes

    def speed(self) -> PassSpeed:
        """Of passes over prompts beside the steps of all that run now; all 0: nobody is refused by it."""
        scheduler, speeds = self._scheduler, self._scheduler.speeds
        idle_s = 0.0 if scheduler.prompts else speeds.idle_s(scheduler.clock())
        return self._beside(speeds.prompts.advertised(idle_s))

    def backlog(self) -> list[Backlog]:
        scheduler = self._scheduler
        if not scheduler.prompts:
            return []
        speed = self._beside(scheduler.speeds.prompts.speed)
        return self._queue(speed, scheduler.pass_tokens).backlog(scheduler.clock())

    def first_token_s(self, sequence: Sequence, slo: Slo) -> float | None:
        """Of a prompt that comes now; None: nobody knows. Raises SloUnattainable if it must be refused."""
        scheduler, speed = self._scheduler, self.speed()
        if not speed.known:
            return None
        now, pass_tokens = scheduler.clock(), scheduler.pass_tokens
        num_found = self._prefixes.num_held_tokens(sequence)
        work_s = speed.prefill_s(len(sequence.token_ids) - num_found, num_found, pass_tokens)
        task = Task(due_at(slo, now, work_s), work_s, slo)
        return admit(self._queue(speed, pass_tokens, task.due_at), task, now)

    def _beside(self, speed: PassSpeed) -> PassSpeed:
        stepping = [s for s in self._scheduler.running if s.num_uncomputed_tokens == 1]
        return self._scheduler.speeds.beside(speed, stepping)

    def _queue(self, speed: PassSpeed, pass_tokens: int, due_at: float = math.inf) -> Queue:
        """Before a newcomer that is due then."""
        scheduler = self._scheduler
        under_way = scheduler.speeds.under_way
        in_pass = {} if under_way is None else {w.sequence: w.num_tokens for w in under_way.work}
        tasks, num_before = [], 0
        for sequence in scheduler.prompts:
            standing = scheduler.standing(sequence)
            num_done = sequence.num_computed_tokens + in_pass.get(sequence, 0) or standing.num_found
            num_left = len(sequence.token_ids) - num_done
            work_s = speed.prefill_s(num_left, num_done, pass_tokens) if num_left else 0.0
            order = standing.order[0] if scheduler.by_due else -math.inf  # the newcomer is the last
            tasks.append(Task(order, work_s, standing.slo))
            num_before += not sequence.block_table and order <= due_at
        return Queue(tasks, scheduler.speeds.busy_s(scheduler.clock()), self._seat_s(num_before))

    def _seat_s(self, num_before: int) -> float:
        """Until there is a seat for one more, behind so many that wait for one."""
        scheduler = self._scheduler
        num_lacking = num_before + 1 - scheduler.room.num_seats
        if num_lacking <= 0 or not scheduler.running:
            return 0.0
        num_left = sorted(scheduler.num_left(s) for s in scheduler.running)
        return num_left[min(num_lacking, len(num_left)) - 1] * scheduler.speeds.step_s(scheduler.running)
