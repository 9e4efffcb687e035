-- The app that macOS starts for a double click, a neuroshard:// link and an invitation file. Only an app gets a link:
-- macOS sends it as an event. `quoted form of` keeps a link one word of the command, whatever it contains.

on run
	do shell script quoted form of theProgram() & " >/dev/null 2>&1 &"
end run

on open location theLink
	openInvitation(theLink)
end open location

on open theFiles
	repeat with theFile in theFiles
		openInvitation(POSIX path of theFile)
	end repeat
end open

-- It shows the invitation in a page. It joins nothing.
on openInvitation(theText)
	do shell script quoted form of theProgram() & " link -- " & quoted form of theText & " >/dev/null 2>&1 &"
end openInvitation

on theProgram()
	return (POSIX path of (path to home folder)) & ".local/bin/neuroshard"
end theProgram
