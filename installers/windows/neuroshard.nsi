; The Windows installer: for one user, without administrator rights. `make windows-installer` compiles it (makensis -WX)
; with VERSION, PAYLOAD (folder of the payload) and OUT (the .exe). installers/environment/bootstrap.py, which has
; tests, makes the environment. This file has the pages, the shortcuts and the uninstaller.

Unicode true
ManifestDPIAware true
RequestExecutionLevel user
SetCompressor /SOLID lzma

!include "MUI2.nsh"
!include "FileFunc.nsh"
!include "LogicLib.nsh"
!include "WordFunc.nsh"

!define NAME "NeuroShard"
!define RUN_KEY "Software\Microsoft\Windows\CurrentVersion\Run"
!define UNINSTALL_KEY "Software\Microsoft\Windows\CurrentVersion\Uninstall\NeuroShard"
!define LINK_KEY "Software\Classes\neuroshard"
!define FILE_KEY "Software\Classes\NeuroShard.Invitation"
!define EXTENSION_KEY "Software\Classes\.neuroshard-invitation"

Name "${NAME} ${VERSION}"
OutFile "${OUT}"
InstallDir "$LOCALAPPDATA\Programs\NeuroShard"
InstallDirRegKey HKCU "Software\NeuroShard" "InstallDir"
BrandingText "${NAME} ${VERSION}"
ShowInstDetails show
ShowUninstDetails show
VIProductVersion "${VERSION}.0"
VIAddVersionKey "ProductName" "${NAME}"
VIAddVersionKey "FileDescription" "${NAME} installer"
VIAddVersionKey "FileVersion" "${VERSION}"
VIAddVersionKey "LegalCopyright" "The NeuroShard contributors, Apache-2.0"

!define MUI_ABORTWARNING
!define MUI_COMPONENTSPAGE_SMALLDESC
!define MUI_WELCOMEPAGE_TEXT "Ordinary computers train one language model together.$\r$\n$\r$\nThe installer downloads Python and \
PyTorch (about 1 GB, with an NVIDIA card about 3 GB) and checks the digest of each package. It changes nothing outside \
your own account. NeuroShard starts by itself only if you choose that."
!define MUI_FINISHPAGE_RUN "$INSTDIR\neuroshard.cmd"
!define MUI_FINISHPAGE_RUN_TEXT "Start NeuroShard"
!insertmacro MUI_PAGE_WELCOME
!insertmacro MUI_PAGE_LICENSE "${PAYLOAD}/LICENSE"
!insertmacro MUI_PAGE_COMPONENTS
!insertmacro MUI_PAGE_DIRECTORY
!insertmacro MUI_PAGE_INSTFILES
!insertmacro MUI_PAGE_FINISH
!insertmacro MUI_UNPAGE_CONFIRM
!insertmacro MUI_UNPAGE_INSTFILES
!insertmacro MUI_LANGUAGE "English"

; uv keeps all its files in the installation folder, so that the uninstaller removes them.
!macro KEEP_UV_INSIDE
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_DIR", t "$INSTDIR\python")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_CACHE_DIR", t "$INSTDIR\cache")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_BIN", t "0")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_REGISTRY", t "0")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "PYTHONUTF8", t "1")i.r0'
!macroend

; Stops a running node after a checkpoint. Exit code 4 means that no node runs. Leaves 0 or the code in $1.
; If the program cannot print its version, no node runs. The owner can then still repair or remove it.
!macro STOP_NODE
  StrCpy $1 0
  nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" --version"'
  Pop $0
  ${If} $0 == 0
    DetailPrint "Stopping the running node, which saves a checkpoint"
    nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" stop --demo"'
    Pop $0
    nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" stop"'
    Pop $1
    ${If} $1 == 4
      StrCpy $1 0
    ${EndIf}
    ${If} $0 != 0
    ${AndIf} $0 != 4
      StrCpy $1 $0
    ${EndIf}
  ${EndIf}
!macroend

; Asks whether to delete a data folder. Never asks about a folder that is not a node's or that contains the home folder.
; A silent uninstallation keeps it.
!macro OFFER_DATA FOLDER
  StrLen $0 "${FOLDER}"
  StrCpy $4 "$PROFILE" $0
  ${If} "${FOLDER}" != "$4"
    ${If} ${FileExists} "${FOLDER}\config.toml"
    ${OrIf} ${FileExists} "${FOLDER}\keys\*.*"
    ${OrIf} ${FileExists} "${FOLDER}\instance.lock"
      ${If} ${Cmd} `MessageBox MB_YESNO|MB_ICONQUESTION|MB_DEFBUTTON2 "Delete your keys, settings and checkpoints in ${FOLDER} too? They cannot be restored." /SD IDNO IDYES`
        RMDir /r "${FOLDER}"
      ${EndIf}
    ${EndIf}
  ${EndIf}
!macroend

Section "NeuroShard" SecProgram
  SectionIn RO
  !insertmacro STOP_NODE
  ${If} $1 != 0
    MessageBox MB_OK|MB_ICONSTOP "A node is running and could not be stopped. Stop it in the dashboard, then install again." /SD IDOK
    SetErrorLevel 2
    Abort "A node is running."
  ${EndIf}
  !insertmacro KEEP_UV_INSIDE
  RMDir /r "$INSTDIR\payload"
  SetOutPath "$INSTDIR\payload"
  File /r "${PAYLOAD}/*.*"
  SetOutPath "$INSTDIR"
  DetailPrint "Downloading Python"
  nsExec::ExecToLog '"$INSTDIR\payload\uv.exe" python install --no-config 3.12'
  Pop $0
  ${If} $0 != 0
    MessageBox MB_OK|MB_ICONSTOP "Python could not be downloaded. Check the internet connection and try again. The details show the error." /SD IDOK
    SetErrorLevel 3
    Abort "Python could not be downloaded."
  ${EndIf}
  DetailPrint "Downloading and checking packages: this takes a few minutes"
  nsExec::ExecToLog '"$INSTDIR\payload\uv.exe" run --no-project --no-config --managed-python --python 3.12 "$INSTDIR\payload\bootstrap.py" --root "$INSTDIR"'
  Pop $0
  ${If} $0 != 0
    MessageBox MB_OK|MB_ICONSTOP "The packages could not be installed. The details show the error, and whether the version before is unchanged." /SD IDOK
    SetErrorLevel 4
    Abort "The packages could not be installed."
  ${EndIf}
  CopyFiles /SILENT "$INSTDIR\payload\neuroshard-link.exe" "$INSTDIR"
  RMDir /r "$INSTDIR\payload"
  RMDir /r "$INSTDIR\cache"
  WriteUninstaller "$INSTDIR\uninstall.exe"
  WriteRegStr HKCU "Software\NeuroShard" "InstallDir" "$INSTDIR"
  ; Links and invitation files. neuroshard.cmd must not open them: see link.nsi.
  WriteRegStr HKCU "${LINK_KEY}" "" "URL:NeuroShard invitation"
  WriteRegStr HKCU "${LINK_KEY}" "URL Protocol" ""
  WriteRegStr HKCU "${LINK_KEY}\shell\open\command" "" '"$INSTDIR\neuroshard-link.exe" "%1"'
  WriteRegStr HKCU "${FILE_KEY}" "" "NeuroShard invitation"
  WriteRegStr HKCU "${FILE_KEY}\shell\open\command" "" '"$INSTDIR\neuroshard-link.exe" "%1"'
  WriteRegStr HKCU "${EXTENSION_KEY}" "" "NeuroShard.Invitation"
  WriteRegStr HKCU "${UNINSTALL_KEY}" "DisplayName" "${NAME}"
  WriteRegStr HKCU "${UNINSTALL_KEY}" "DisplayVersion" "${VERSION}"
  WriteRegStr HKCU "${UNINSTALL_KEY}" "Publisher" "The NeuroShard contributors"
  WriteRegStr HKCU "${UNINSTALL_KEY}" "InstallLocation" "$INSTDIR"
  WriteRegStr HKCU "${UNINSTALL_KEY}" "UninstallString" '"$INSTDIR\uninstall.exe"'
  WriteRegStr HKCU "${UNINSTALL_KEY}" "QuietUninstallString" '"$INSTDIR\uninstall.exe" /S'
  WriteRegDWORD HKCU "${UNINSTALL_KEY}" "NoModify" 1
  WriteRegDWORD HKCU "${UNINSTALL_KEY}" "NoRepair" 1
  ${GetSize} "$INSTDIR" "/S=0K" $0 $1 $2
  WriteRegDWORD HKCU "${UNINSTALL_KEY}" "EstimatedSize" $0
SectionEnd

Section "Start menu" SecMenu
  CreateDirectory "$SMPROGRAMS\NeuroShard"
  CreateShortcut "$SMPROGRAMS\NeuroShard\NeuroShard.lnk" "$INSTDIR\neuroshard.cmd" "" "$INSTDIR\uninstall.exe" 0 SW_SHOWMINIMIZED
  CreateShortcut "$SMPROGRAMS\NeuroShard\Demo.lnk" "$INSTDIR\neuroshard.cmd" "demo" "$INSTDIR\uninstall.exe" 0
  CreateShortcut "$SMPROGRAMS\NeuroShard\Uninstall.lnk" "$INSTDIR\uninstall.exe"
SectionEnd

; /o: off until the user selects it. `neuroshard update` does not use this section.
Section /o "Start with Windows" SecAutostart
  nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" autostart on"'
  Pop $0
  ${If} $0 != 0
    DetailPrint "Autostart could not be turned on. You can turn it on later in the dashboard's settings."
  ${EndIf}
SectionEnd

LangString DESC_Program ${LANG_ENGLISH} "The program with its own Python and packages."
LangString DESC_Menu ${LANG_ENGLISH} "Shortcuts in the Start menu."
LangString DESC_Autostart ${LANG_ENGLISH} "Run a node whenever you sign in. Off unless you choose it."
!insertmacro MUI_FUNCTION_DESCRIPTION_BEGIN
  !insertmacro MUI_DESCRIPTION_TEXT ${SecProgram} $(DESC_Program)
  !insertmacro MUI_DESCRIPTION_TEXT ${SecMenu} $(DESC_Menu)
  !insertmacro MUI_DESCRIPTION_TEXT ${SecAutostart} $(DESC_Autostart)
!insertmacro MUI_FUNCTION_DESCRIPTION_END

Section "Uninstall"
  !insertmacro STOP_NODE
  ${If} $1 != 0
    MessageBox MB_OK|MB_ICONSTOP "A node is running and could not be stopped. Stop it in the dashboard, then uninstall again." /SD IDOK
    SetErrorLevel 2
    Abort "A node is running."
  ${EndIf}
  ; Before the program is removed, it prints its data folders: one per line, at most two.
  StrCpy $2 ""
  StrCpy $3 ""
  nsExec::ExecToStack '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" folders"'
  Pop $0
  Pop $4
  ${If} $0 == 0
    ${WordFind} "$4" "$\r$\n" "+1" $2
    ClearErrors
    ${WordFind} "$4" "$\r$\n" "E+2" $3
    ${If} ${Errors}
      StrCpy $3 ""
    ${EndIf}
    nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" autostart off"'
    Pop $0
  ${Else}
    StrCpy $2 "$LOCALAPPDATA\neuroshard"
    ${If} ${FileExists} "$PROFILE\.neuroshard\*.*"
      StrCpy $2 "$PROFILE\.neuroshard"
    ${EndIf}
    DeleteRegValue HKCU "${RUN_KEY}" "NeuroShard"
  ${EndIf}
  ; Only named folders and files: the folder that the user chose may contain other files.
  RMDir /r "$INSTDIR\versions"
  RMDir /r "$INSTDIR\downloads"
  RMDir /r "$INSTDIR\payload"
  RMDir /r "$INSTDIR\python"
  RMDir /r "$INSTDIR\cache"
  Delete "$INSTDIR\neuroshard.cmd"
  Delete "$INSTDIR\neuroshard-link.exe"
  Delete "$INSTDIR\current"
  Delete "$INSTDIR\previous"
  Delete "$INSTDIR\update.lock"
  Delete "$INSTDIR\uninstall.exe"
  RMDir "$INSTDIR"
  RMDir /r "$SMPROGRAMS\NeuroShard"
  DeleteRegKey HKCU "${LINK_KEY}"
  DeleteRegKey HKCU "${FILE_KEY}"
  DeleteRegKey HKCU "${EXTENSION_KEY}"
  DeleteRegKey HKCU "${UNINSTALL_KEY}"
  DeleteRegKey HKCU "Software\NeuroShard"
  !insertmacro OFFER_DATA "$2"
  !insertmacro OFFER_DATA "$3"
SectionEnd
