// Runs before the first paint so that a chosen theme never flashes; without a choice the system decides.
(function () {
  try {
    var theme = localStorage.getItem("neuroshard-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch (error) {
    // Storage may be forbidden; the system's preference is a good answer then.
  }
})();
