"""The one error of the loaders."""


class ModelFileError(ValueError):
    """A model file is missing, damaged, or not what its own metadata says.

    The message is one line and names the file.
    """
