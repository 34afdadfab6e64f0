"""The priority of an engine's processes. Ray starts worker processes at nice 15, behind everything else on the node.

Called by the actors that a step waits for. Their threads would otherwise lose their processors to any process that runs
beside them, the driver and Ray's own among them.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

RAY_SETTING = "RAY_worker_niceness"


def undo_ray_niceness() -> None:
    """Give all threads of this process the default priority, where the system permits.

    Who sets RAY_worker_niceness for the node has chosen a priority, which stays.
    """
    if RAY_SETTING in os.environ:
        return
    # On Linux each thread has a niceness of its own, which threads it starts inherit.
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            if os.getpriority(os.PRIO_PROCESS, thread) > 0:
                os.setpriority(os.PRIO_PROCESS, thread, 0)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        except PermissionError as error:
            logger.info("This process keeps the low priority Ray gave it: %s", error)
            return
