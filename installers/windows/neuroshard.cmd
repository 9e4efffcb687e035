@echo off
rem Starts the version that the file "current" names; "neuroshard update" changes that name.
setlocal
set /p NS_VERSION=<"%~dp0current"
"%~dp0versions\%NS_VERSION%\Scripts\neuroshard.exe" %*
exit /b %ERRORLEVEL%
