"""moto's server with atomic conditional puts, as S3 has them: ``python moto_server.py -H … -p …``.

moto looks for an object and stores it in two steps, so two threads may both create it.
"""

from __future__ import annotations

import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_ONE_AT_A_TIME = threading.Lock()
_put_object = S3Response.put_object


def put_object(response: Any) -> Any:
    """Stores an object if its conditions hold, alone."""
    with _ONE_AT_A_TIME:
        return _put_object(response)


if __name__ == "__main__":
    S3Response.put_object = put_object
    main()
