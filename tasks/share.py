"""A share of a measurement as a Prefect task, which a worker of a cluster carries out."""

import logging
import os
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from exl2flow.core.errors import ConfigError, Exl2FlowError, Interrupted
from exl2flow.core.runtime.interrupt import listening
from exl2flow.core.store.apart import CPU_KIND, ApartShare, work_apart
from exl2flow.core.store.crew import Errand
from exl2flow.tasks.logs import logged
from exl2flow.tasks.sweep import ProcessShare, own_device

REFUSED = "refused: "  # what no other worker could do either, in the message of a state
log = logging.getLogger(__name__)


@task(name="share", task_run_name="share {share.rank}", persist_result=False)
def make_share(errand: Errand, share: ApartShare, process: ProcessShare) -> State[Any]:
    """Make a share of a stage on a free device of this host.

    Like `make_bitrate`, it returns errors in a state.

    Returns:
        Completed, failed with the error, or cancelled with `Interrupted`.
    """
    try:
        with logged(), listening() as stop, own_device(errand.config, process, stop):
            log.info("share=%d of %d process=%d", share.rank + 1, share.count, os.getpid())
            device = "cpu" if share.kind == CPU_KIND else "cuda"  # the only one it sees
            work_apart(errand, share, device)
            return Completed()
    except Interrupted as stop:
        return Cancelled(message=str(stop), data=stop)
    except ConfigError as error:
        return Failed(message=f"{REFUSED}{error}", data=error)
    except Exl2FlowError as error:
        return Failed(message=str(error), data=error)
    except Exception as error:  # this host may lack what others have
        log.exception("share=%d", share.rank)
        return Failed(message=f"{type(error).__name__}: {error}", data=error)
