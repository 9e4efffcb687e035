; The Windows installer: for one user, without administrator rights. Compiled by `make windows-installer` (makensis -WX)
; with VERSION, PAYLOAD (folder of the payload) and OUT (the .exe). The work is done by
; installers/environment/bootstrap.py, which is tested; here are the pages, the shortcuts and the way out.

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
!define MUI_WELCOMEPAGE_TEXT "Ordinary computers train one language model together.$\r$\n$\r$\nThe installer fetches Python and \
PyTorch (about 1 GB, with an NVIDIA card about 3 GB), checks each package against the digests it carries, and changes \
nothing outside your own account. Nothing starts by itself unless you choose it."
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

; Everything that uv keeps lies inside the folder, so that uninstalling leaves nothing behind.
!macro KEEP_UV_INSIDE
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_DIR", t "$INSTDIR\python")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_CACHE_DIR", t "$INSTDIR\cache")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_BIN", t "0")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "UV_PYTHON_INSTALL_REGISTRY", t "0")i.r0'
  System::Call 'Kernel32::SetEnvironmentVariable(t "PYTHONUTF8", t "1")i.r0'
!macroend

; A running node ends with a checkpoint. Exit code 4 means that none runs. Leaves 0 or the code in $1.
; A program that cannot print its version has no node to stop: it must not keep the owner from repairing or removing it.
!macro STOP_NODE
  StrCpy $1 0
  nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" --version"'
  Pop $0
  ${If} $0 == 0
    DetailPrint "Stopping a running node after a checkpoint"
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

; Offers one folder of data for deletion, unless it is not a node's folder, or contains the home folder.
; Silent uninstalling keeps it.
!macro OFFER_DATA FOLDER
  StrLen $0 "${FOLDER}"
  StrCpy $4 "$PROFILE" $0
  ${If} "${FOLDER}" != "$4"
    ${If} ${FileExists} "${FOLDER}\config.toml"
    ${OrIf} ${FileExists} "${FOLDER}\keys\*.*"
    ${OrIf} ${FileExists} "${FOLDER}\instance.lock"
      ${If} ${Cmd} `MessageBox MB_YESNO|MB_ICONQUESTION|MB_DEFBUTTON2 "Delete your keys, settings and checkpoints in ${FOLDER} as well? They cannot be brought back." /SD IDNO IDYES`
        RMDir /r "${FOLDER}"
      ${EndIf}
    ${EndIf}
  ${EndIf}
!macroend

Section "NeuroShard" SecProgram
  SectionIn RO
  !insertmacro STOP_NODE
  ${If} $1 != 0
    MessageBox MB_OK|MB_ICONSTOP "A node is running and could not be stopped. Stop it in its dashboard and install again." /SD IDOK
    SetErrorLevel 2
    Abort "A node is running."
  ${EndIf}
  !insertmacro KEEP_UV_INSIDE
  RMDir /r "$INSTDIR\payload"
  SetOutPath "$INSTDIR\payload"
  File /r "${PAYLOAD}/*.*"
  SetOutPath "$INSTDIR"
  DetailPrint "Fetching Python"
  nsExec::ExecToLog '"$INSTDIR\payload\uv.exe" python install --no-config 3.12'
  Pop $0
  ${If} $0 != 0
    MessageBox MB_OK|MB_ICONSTOP "Python could not be fetched. Check the internet connection and try again; the details say more." /SD IDOK
    SetErrorLevel 3
    Abort "Python could not be fetched."
  ${EndIf}
  DetailPrint "Fetching and checking packages: this takes some minutes"
  nsExec::ExecToLog '"$INSTDIR\payload\uv.exe" run --no-project --no-config --managed-python --python 3.12 "$INSTDIR\payload\bootstrap.py" --root "$INSTDIR"'
  Pop $0
  ${If} $0 != 0
    MessageBox MB_OK|MB_ICONSTOP "The packages could not be installed; the details say why, and whether what was here before is unchanged." /SD IDOK
    SetErrorLevel 4
    Abort "The packages could not be installed."
  ${EndIf}
  RMDir /r "$INSTDIR\payload"
  RMDir /r "$INSTDIR\cache"
  WriteUninstaller "$INSTDIR\uninstall.exe"
  WriteRegStr HKCU "Software\NeuroShard" "InstallDir" "$INSTDIR"
  ; Nothing is registered for neuroshard:// links: cmd.exe would expand % in a link before the program sees it, so a
  ; link could run a command. It needs a launcher that is not a batch file.
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

; /o: not chosen unless the user does. An update never comes through here.
Section /o "Start with Windows" SecAutostart
  nsExec::ExecToLog '"$SYSDIR\cmd.exe" /d /s /c ""$INSTDIR\neuroshard.cmd" autostart on"'
  Pop $0
  ${If} $0 != 0
    DetailPrint "Autostart could not be switched on; the dashboard's settings can do it later."
  ${EndIf}
SectionEnd

LangString DESC_Program ${LANG_ENGLISH} "The program, its Python and its packages."
LangString DESC_Menu ${LANG_ENGLISH} "Shortcuts in the start menu."
LangString DESC_Autostart ${LANG_ENGLISH} "Run a node whenever you sign in. Off unless you choose it."
!insertmacro MUI_FUNCTION_DESCRIPTION_BEGIN
  !insertmacro MUI_DESCRIPTION_TEXT ${SecProgram} $(DESC_Program)
  !insertmacro MUI_DESCRIPTION_TEXT ${SecMenu} $(DESC_Menu)
  !insertmacro MUI_DESCRIPTION_TEXT ${SecAutostart} $(DESC_Autostart)
!insertmacro MUI_FUNCTION_DESCRIPTION_END

Section "Uninstall"
  !insertmacro STOP_NODE
  ${If} $1 != 0
    MessageBox MB_OK|MB_ICONSTOP "A node is running and could not be stopped. Stop it in its dashboard and uninstall again." /SD IDOK
    SetErrorLevel 2
    Abort "A node is running."
  ${EndIf}
  ; the program is asked where the data are while it is still there: one folder per line, at most two
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
  ; named folders and files only: the user may have chosen a folder that holds other things
  RMDir /r "$INSTDIR\versions"
  RMDir /r "$INSTDIR\downloads"
  RMDir /r "$INSTDIR\payload"
  RMDir /r "$INSTDIR\python"
  RMDir /r "$INSTDIR\cache"
  Delete "$INSTDIR\neuroshard.cmd"
  Delete "$INSTDIR\current"
  Delete "$INSTDIR\previous"
  Delete "$INSTDIR\update.lock"
  Delete "$INSTDIR\uninstall.exe"
  RMDir "$INSTDIR"
  RMDir /r "$SMPROGRAMS\NeuroShard"
  DeleteRegKey HKCU "${UNINSTALL_KEY}"
  DeleteRegKey HKCU "Software\NeuroShard"
  !insertmacro OFFER_DATA "$2"
  !insertmacro OFFER_DATA "$3"
SectionEnd
