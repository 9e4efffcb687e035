// An invitation: the field that takes it (pasted, dropped, scanned or from a file), and what it says.

import type { InvitationBody } from "../api/bodies";
import { useEffect, useRef, useState } from "preact/hooks";
import { Facts } from "../components/parts";
import { Fault } from "../setup/fields";
import { hasCamera, scan, textOfPicture } from "./qr";
import { factsOf, PASTE } from "./words";

const LONGEST_FILE_BYTES = 64 * 1024;
const LONGEST_PICTURE_BYTES = 20_000_000;
const SUFFIX = ".neuroshard-invitation";

/** The text of an invitation file or of a picture of its QR code. Rejects with a sentence for the reader. */
async function textOf(file: File): Promise<string> {
  if (!file.type.startsWith("image/")) {
    if (file.size > LONGEST_FILE_BYTES) throw new Error(PASTE.tooLong);
    return file.text();
  }
  if (file.size > LONGEST_PICTURE_BYTES) throw new Error(PASTE.noPicture);
  const text = await textOfPicture(file).catch(() => {
    throw new Error(PASTE.noPicture);
  });
  if (text === null) throw new Error(PASTE.noCode);
  return text;
}

export function InvitationField(props: { value: string; onInput: (text: string) => void; fault: string | undefined }) {
  const [isOver, setIsOver] = useState(false);
  const [fileFault, setFileFault] = useState("");
  const [isScanning, setIsScanning] = useState(false);
  const canScan = useCamera();
  const input = (text: string) => {
    setFileFault("");
    props.onInput(text);
  };
  const take = (file: File | null | undefined) => {
    if (!file) return;
    textOf(file).then(
      (text) => input(text.trim()),
      (error: unknown) => setFileFault(error instanceof Error ? error.message : String(error)),
    );
  };
  const fault = fileFault || props.fault;
  return (
    <div
      class={`setup-field drop ${isOver ? "drop-over" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setIsOver(true);
      }}
      onDragLeave={() => setIsOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setIsOver(false);
        const dropped = event.dataTransfer?.files[0];
        if (dropped) take(dropped);
        else input(event.dataTransfer?.getData("text") ?? "");
      }}
    >
      <label for="invitation">{PASTE.label}</label>
      <textarea
        id="invitation"
        rows={5}
        class="mono"
        value={props.value}
        autocomplete="off"
        autocapitalize="none"
        spellcheck={false}
        aria-invalid={fault ? true : undefined}
        aria-describedby={`invitation-hint${fault ? " invitation-fault" : ""}`}
        onInput={(event) => input(event.currentTarget.value)}
      />
      <p class="muted small" id="invitation-hint">
        {PASTE.hint}
      </p>
      <Fault id="invitation-fault" text={fault} />
      {isScanning && (
        <Camera
          onText={(text) => {
            setIsScanning(false);
            input(text.trim());
          }}
        />
      )}
      <div class="button-row">
        <label class="button file-button">
          {PASTE.open}
          <input
            type="file"
            class="hidden-visually"
            accept={`${SUFFIX},text/plain,image/*`}
            onChange={(event) => {
              take(event.currentTarget.files?.[0]);
              event.currentTarget.value = ""; // the same file may be opened again
            }}
          />
        </label>
        {canScan && (
          <button type="button" class="button" onClick={() => setIsScanning(!isScanning)}>
            {isScanning ? PASTE.closeCamera : PASTE.scan}
          </button>
        )}
      </div>
    </div>
  );
}

function Camera({ onText }: { onText: (text: string) => void }) {
  const video = useRef<HTMLVideoElement>(null);
  const [fault, setFault] = useState("");
  useEffect(() => {
    const ending = new AbortController();
    scan(video.current!, ending.signal, onText).catch((error: unknown) => {
      const isForbidden = error instanceof DOMException && error.name === "NotAllowedError";
      if (!ending.signal.aborted) setFault(isForbidden ? PASTE.forbidden : PASTE.noCamera);
    });
    return () => ending.abort();
  }, []);
  return (
    <div class="camera">
      <video ref={video} muted playsInline hidden={fault !== ""} aria-label={PASTE.camera} />
      {fault === "" && <p class="muted small">{PASTE.hold}</p>}
      <Fault id="camera-fault" text={fault} />
    </div>
  );
}

/** Whether this page may ask for a camera; without one there is nothing to scan with. */
function useCamera(): boolean {
  const [found, setFound] = useState(false);
  useEffect(() => {
    hasCamera().then(setFound, () => setFound(false));
  }, []);
  return found;
}

export function InvitationFacts({ invitation }: { invitation: InvitationBody }) {
  return <Facts rows={factsOf(invitation)} />;
}
