"""The registry key of Windows that lists the programs started at login. Imported on Windows only."""

from __future__ import annotations

import sys

from neuroshard.errors import StorageError

if sys.platform == "win32":
    import winreg

    class RunKey:
        """String values of one key below HKEY_CURRENT_USER. Methods raise StorageError."""

        def __init__(self, key: str) -> None:
            self._key = key

        def get(self, name: str) -> str | None:
            try:
                with winreg.OpenKey(winreg.HKEY_CURRENT_USER, self._key) as key:
                    return str(winreg.QueryValueEx(key, name)[0])
            except FileNotFoundError:
                return None
            except OSError as error:
                raise _refused(error) from error

        def set(self, name: str, value: str) -> None:
            try:
                with winreg.CreateKey(winreg.HKEY_CURRENT_USER, self._key) as key:
                    winreg.SetValueEx(key, name, 0, winreg.REG_SZ, value)
            except OSError as error:
                raise _refused(error) from error

        def delete(self, name: str) -> None:
            try:
                with winreg.OpenKey(winreg.HKEY_CURRENT_USER, self._key, 0, winreg.KEY_SET_VALUE) as key:
                    winreg.DeleteValue(key, name)
            except FileNotFoundError:
                return
            except OSError as error:
                raise _refused(error) from error

    def _refused(error: OSError) -> StorageError:
        return StorageError(
            f"The registry refused the change: {error.strerror}.", "Look at the Startup page of the Task Manager."
        )
else:

    class RunKey:
        """The class for systems without a registry: its constructor raises StorageError."""

        def __init__(self, key: str) -> None:
            raise StorageError(f"There is no registry key {key} here.", "")

        def get(self, name: str) -> str | None:
            """Never called."""
            del name
            return None

        def set(self, name: str, value: str) -> None:
            """Never called."""

        def delete(self, name: str) -> None:
            """Never called."""
