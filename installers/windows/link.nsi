; neuroshard-link.exe: opens a neuroshard:// link or an invitation file in the page of the node. Windows starts it with
; the link in quotes. cmd.exe is not used, because it would expand % in a link, so a link could run a command.
; `make windows-installer` compiles it (makensis -WX) with VERSION and OUT (the .exe). Not run: it needs Windows.

Unicode true
ManifestDPIAware true
RequestExecutionLevel user
SilentInstall silent

!include "FileFunc.nsh"
!include "LogicLib.nsh"

!define MOST_CHARACTERS 900 ; makensis keeps at most 1023 of a command line

Name "NeuroShard"
OutFile "${OUT}"
VIProductVersion "${VERSION}.0"
VIAddVersionKey "ProductName" "NeuroShard"
VIAddVersionKey "FileDescription" "Opens NeuroShard invitations"
VIAddVersionKey "FileVersion" "${VERSION}"
VIAddVersionKey "LegalCopyright" "The NeuroShard contributors, Apache-2.0"

!macro REFUSE WORDS
  MessageBox MB_OK|MB_ICONSTOP "${WORDS}"
  SetErrorLevel 2
  Quit
!macroend

Section
  ${GetParameters} $0
  StrLen $1 $0
  ${If} $1 > ${MOST_CHARACTERS}
    !insertmacro REFUSE "This link is too long for Windows. Copy it, and paste it in the NeuroShard page under Join with an invitation."
  ${EndIf}
  StrCpy $2 $0 1
  StrCpy $3 $0 1 -1
  ${If} $1 < 3
  ${OrIf} $2 != '"'
  ${OrIf} $3 != '"'
    !insertmacro REFUSE "This program opens NeuroShard links. Click a link, or open an invitation file."
  ${EndIf}
  StrCpy $0 $0 -1 1
  ; Windows does not escape a quotation mark in a link: after it, the link could continue with options of its own.
  StrCpy $1 0
  ${Do}
    StrCpy $2 $0 1 $1
    ${If} $2 == '"'
      !insertmacro REFUSE "This is not a NeuroShard invitation."
    ${EndIf}
    IntOp $1 $1 + 1
  ${LoopUntil} $2 == ""
  ClearErrors
  FileOpen $4 "$EXEDIR\current" r
  FileRead $4 $5
  FileClose $4
  ${If} ${Errors}
    !insertmacro REFUSE "NeuroShard is not complete. Install it again."
  ${EndIf}
  ${Do} ; the file may end with a line break
    StrCpy $2 $5 1 -1
    ${If} $2 != "$\r"
    ${AndIf} $2 != "$\n"
      ${ExitDo}
    ${EndIf}
    StrCpy $5 $5 -1
  ${Loop}
  Exec '"$EXEDIR\versions\$5\Scripts\neuroshard.exe" link -- "$0"'
  ${If} ${Errors}
    !insertmacro REFUSE "NeuroShard is not complete. Install it again."
  ${EndIf}
SectionEnd
