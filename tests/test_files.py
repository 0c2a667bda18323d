import os

import pytest

from nmla.errors import UsageError
from nmla.files import check_output, write_text


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for write in (check_output, lambda path: write_text(path, "new")):
        with pytest.raises(UsageError, match="pipe: must be a file to write, but is a device or a pipe"):
            write(tmp_path / "pipe")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
