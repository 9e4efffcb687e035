// A line of text to take elsewhere, with a button that copies it.

import { useEffect, useRef, useState } from "preact/hooks";

const SHOWN_MS = 4_000;

export function CopyLine({ text, name }: { text: string; name: string }) {
  const line = useRef<HTMLElement>(null);
  const [outcome, setOutcome] = useState("");
  useEffect(() => {
    if (outcome === "") return;
    const timer = setTimeout(() => setOutcome(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [outcome]);
  const copy = async () => {
    const copied = (await written(text)) || (line.current !== null && copiedBySelection(line.current));
    setOutcome(copied ? "Copied" : "Selected: press Ctrl+C (⌘C)");
  };
  return (
    <div class="copy-line">
      <code ref={line} tabIndex={0} aria-label={name}>
        {text}
      </code>
      <div class="copy-action">
        <button type="button" class="button" aria-label={`Copy: ${name}`} onClick={() => void copy()}>
          Copy
        </button>
        <span class="small text-good" role="status">
          {outcome}
        </span>
      </div>
    </div>
  );
}

/** The clipboard is there only in pages of this computer or behind https, and may be forbidden. */
async function written(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // the caller selects the text instead
  }
}

function copiedBySelection(element: HTMLElement): boolean {
  getSelection()?.selectAllChildren(element);
  return document.execCommand("copy");
}
