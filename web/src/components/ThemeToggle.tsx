// Dark or light: the system's preference until the reader chooses.

import { useState } from "preact/hooks";
import { Icon } from "./parts";

function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function ThemeToggle() {
  const [dark, setDark] = useState(isDark);
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
