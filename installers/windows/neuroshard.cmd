@echo off
rem Starts the version named in the file "current", which "neuroshard update" writes.
setlocal
set /p NS_VERSION=<"%~dp0current"
"%~dp0versions\%NS_VERSION%\Scripts\neuroshard.exe" %*
exit /b %ERRORLEVEL%
