"""An engine behind HTTP, with the interface of OpenAI; needs the `serve` extra."""
