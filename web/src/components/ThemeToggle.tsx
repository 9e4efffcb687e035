// Dark or light: the system's preference until the reader chooses.

import { useEffect, useState } from "preact/hooks";
import { Icon } from "./parts";

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");

function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : SYSTEM.matches;
}

export function ThemeToggle() {
  const [dark, setDark] = useState(isDark);
  useEffect(() => {
    const follow = () => setDark(isDark());
    SYSTEM.addEventListener("change", follow);
    return () => SYSTEM.removeEventListener("change", follow);
  }, []);
  const toggle = () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset["theme"] = theme;
    try {
      localStorage.setItem("neuroshard-theme", theme);
    } catch {
      // Storage may be forbidden; the choice then lasts until the page is closed.
    }
    setDark(theme === "dark");
  };
  const label = dark ? "Switch to light colours" : "Switch to dark colours";
  return (
    <button type="button" class="button button-icon" aria-label={label} title={label} onClick={toggle}>
      <Icon name={dark ? "sun" : "moon"} />
    </button>
  );
}
