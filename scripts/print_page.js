// Returns a page's article as one book needs it: places named after the page, links to places, nothing to press.
([page, pages, words]) => {
  const article = document.querySelector("article.bd-article");
  const slug = (name) => name.replaceAll("/", "-");
  const place = (name, id) => (id ? `${slug(name)}--${id}` : slug(name));
  const root = new URL(document.documentElement.dataset.content_root, location.href);

  // what style sheets say of a drawing is written into it: a reader of EPUBs does not have them
  const usual = { "stroke-width": "1px", "stroke-dasharray": "none", opacity: "1", "fill-opacity": "1", "text-anchor": "start", "font-weight": "400" };
  const written = (node) => {
    const look = getComputedStyle(node);
    if (node instanceof SVGGraphicsElement) {
      const names = ["fill", "stroke", ...Object.keys(usual), ...(node.matches("text, tspan") ? ["font-size"] : [])];
      names.forEach((name) => look.getPropertyValue(name) === usual[name] || node.style.setProperty(name, look.getPropertyValue(name)));
    } else if (look.backgroundColor !== "rgba(0, 0, 0, 0)") {
      node.style.backgroundColor = look.backgroundColor;
      if (!node.textContent.trim()) Object.assign(node.style, { display: look.display, height: look.height });
    }
  };

  article.querySelectorAll(".live-figure").forEach((figure, number) => {
    figure.querySelectorAll(":not(input, select, option, textarea, button)").forEach(written);
    // as it is drawn now, without its controls, and with the words for readers who cannot move it
    figure.querySelectorAll("input, select, textarea, button, .controls, .buttons, script").forEach((node) => node.remove());
    figure.querySelectorAll("label").forEach((label) => label.remove());
    const caption = document.createElement("p");
    caption.className = "live-words";
    caption.textContent = `Live figure in the online edition. ${words[number]}`;
    figure.append(caption);
    figure.removeAttribute("data-state");
    figure.removeAttribute("data-live");
  });
  article.querySelectorAll(
    "script, style, .headerlink, .only-dark, .run-links, .quiz-why, .quiz-verdict, .quiz-score, button",
  ).forEach((node) => node.remove());
  article.querySelectorAll(".quiz-choice input").forEach((input) => input.remove());
  article.querySelectorAll("details").forEach((details) => {
    // folded code stays away; what else folds is opened
    if (details.matches(".hide.above-input")) details.remove();
    else details.open = true;
  });
  article.querySelectorAll("img[loading]").forEach((image) => image.removeAttribute("loading"));
  article.querySelectorAll("[tabindex]").forEach((node) => node.removeAttribute("tabindex"));
  article.querySelectorAll("img[src]").forEach((image) => {
    image.setAttribute("src", decodeURI(new URL(image.getAttribute("src"), location.href).href.replace(root.href, "")));
  });
  article.querySelectorAll("a[href]").forEach((link) => {
    const target = new URL(link.getAttribute("href"), location.href);
    if (!target.href.startsWith(root.href)) return;
    const path = target.pathname.slice(root.pathname.length);
    const name = path.replace(/\.html$/, "");
    if (!path.endsWith(".html") || !pages.includes(name)) {
      const item = link.closest("li, p"); // a file to download that is all there is
      if (link.matches(".download") && item?.textContent.trim() === link.textContent.trim()) item.remove();
      else link.replaceWith(...link.childNodes);
      return;
    }
    link.setAttribute("href", `#${place(name, decodeURIComponent(target.hash.slice(1)))}`);
  });
  const places = [place(page, "")];
  article.querySelectorAll("[id]").forEach((node) => {
    node.id = place(page, node.id);
    places.push(node.id);
  });
  ["for", "aria-labelledby", "aria-describedby"].forEach((name) =>
    article.querySelectorAll(`[${name}]`).forEach((node) =>
      node.setAttribute(name, node.getAttribute(name).split(/\s+/).map((id) => place(page, id)).join(" ")),
    ),
  );
  const headings = [...article.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((heading, number) => {
    heading.id = `${slug(page)}--heading-${number}`;
    places.push(heading.id);
    return { level: Number(heading.tagName[1]), text: heading.textContent.trim(), id: heading.id };
  });
  const box = document.createElement("div");
  box.id = place(page, "");
  box.append(...article.childNodes);
  return {
    html: new XMLSerializer().serializeToString(box).replaceAll(' xmlns="http://www.w3.org/1999/xhtml"', ""),
    title: headings[0]?.text ?? document.title,
    headings,
    places,
    updated: document.querySelector('meta[name="docbuild:last-update"]')?.content ?? "",
  };
}
