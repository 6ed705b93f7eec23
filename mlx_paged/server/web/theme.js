// Sets the theme before anything is drawn; so this is no module.

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem("mlx-paged.theme") ?? "system";
    } catch {
      return "system";
    }
  };
  const apply = () => {
    const theme = chosen();
    document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  };
  dark.addEventListener("change", apply);
  addEventListener("storage", apply);
  addEventListener("theme", apply); // sent by the settings
  apply();
})();
