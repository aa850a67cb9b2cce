from hpctrain import errors as errors
from hpctrain.api import load_run as load_run
from hpctrain.api import session as session
from hpctrain.api import submit as submit
from hpctrain.api import submit_function as submit_function
from hpctrain.api import train as train
from hpctrain.engine.loop import supervised as supervised
from hpctrain.engine.part import Part as Part
from hpctrain.engine.session import Session as Session

__version__: str
