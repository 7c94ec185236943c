"""What a client is told when something is wrong: OpenAI's error object."""

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than 200.

    Args:
      status: of the response.
      message: one sentence for people.
      code: one word for programs.
      param: the field of the request that is wrong.
      retry_after: seconds after which another try makes sense.
      closes: ends the connection, since the rest of the request was not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if closes:
            self.headers["connection"] = "close"

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that is wrong whoever serves it."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(message: str, param: str) -> ApiError:
    """A request that is sound, but asks for what this server does not do."""
    return ApiError(422, message, code="unsupported", param=param)
