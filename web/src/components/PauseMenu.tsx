// Pausing for a while: a small list next to the Pause button.

import { useEffect, useRef } from "preact/hooks";

interface Props {
  disabled: boolean;
  onPause: (seconds: number) => void;
}

const WHILES: readonly (readonly [string, number])[] = [
  ["15 minutes", 900],
  ["1 hour", 3_600],
  ["4 hours", 14_400],
  ["1 day", 86_400],
];

export function PauseMenu({ disabled, onPause }: Props) {
  const menu = useRef<HTMLDetailsElement>(null);
  const close = () => menu.current?.removeAttribute("open");
  useEffect(() => {
    const elsewhere = (event: Event) => {
      if (!menu.current?.contains(event.target as Node)) close();
    };
    const escaped = (event: KeyboardEvent) => {
      if (event.key !== "Escape" || !menu.current?.open) return;
      close();
      menu.current.querySelector("summary")?.focus();
    };
    document.addEventListener("pointerdown", elsewhere);
    document.addEventListener("focusin", elsewhere);
    document.addEventListener("keydown", escaped);
    return () => {
      document.removeEventListener("pointerdown", elsewhere);
      document.removeEventListener("focusin", elsewhere);
      document.removeEventListener("keydown", escaped);
    };
  }, []);
  return (
    <details class="menu" ref={menu}>
      <summary class="button">For a while…</summary>
      <ul class="menu-list">
        {WHILES.map(([words, seconds]) => (
          <li key={words}>
            <button
              type="button"
              class="button"
              aria-disabled={disabled} // not `disabled`: Tab would pass over the list, which closes without the focus
              onClick={() => {
                if (disabled) return;
                close();
                onPause(seconds);
              }}
            >
              {words}
            </button>
          </li>
        ))}
      </ul>
    </details>
  );
}
