// Asks before the node is stopped: the one button that ends the program.

import { useEffect, useRef } from "preact/hooks";

interface Props {
  open: boolean;
  couldLose: string;
  onCancel: () => void;
  onConfirm: () => void;
}

export function StopDialog({ open, couldLose, onCancel, onConfirm }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const element = dialog.current;
    if (!element) return;
    if (open && !element.open) element.showModal();
    if (!open && element.open) element.close();
  }, [open]);
  return (
    <dialog ref={dialog} class="dialog" aria-labelledby="stop-title" aria-describedby="stop-text" onClose={onCancel}>
      <h2 id="stop-title">Stop the node?</h2>
      <p id="stop-text">
        It saves a final checkpoint and then the program ends. Finished steps are kept: the next start continues from there. This
        page stays open, but it can only show the last values. To rest for a while, pause instead.
      </p>
      <p class="muted small">Without that final checkpoint, a kill now could lose {couldLose}.</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick={onCancel} autofocus>
          Keep it running
        </button>
        <button type="button" class="button button-danger" onClick={onConfirm}>
          Save and stop
        </button>
      </div>
    </dialog>
  );
}
