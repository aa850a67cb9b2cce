from hpctrain import errors as errors
from hpctrain.api import load_run as load_run
from hpctrain.api import submit as submit
from hpctrain.api import submit_function as submit_function
from hpctrain.api import train as train

__version__: str
