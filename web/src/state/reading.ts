// An answer of the node that is read again and again while somebody looks at it.

import { useEffect, useState } from "preact/hooks";

const READ_MS = 2_000;

/** The newest answer; read every `everyMs`, and at once when `occasion` changes. */
export function useReading<T>(read: () => Promise<T>, reachable: boolean, occasion: unknown, everyMs = READ_MS): T | null {
  const [answer, setAnswer] = useState<T | null>(null);
  useEffect(() => {
    if (!reachable) return;
    let isOver = false;
    const readNow = async () => {
      if (document.hidden) return;
      const next = await read().catch(() => null); // whether the node answers at all is shown elsewhere
      if (next && !isOver) setAnswer(next);
    };
    void readNow();
    const timer = setInterval(() => void readNow(), everyMs);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [read, reachable, occasion, everyMs]);
  return answer;
}
