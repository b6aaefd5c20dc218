// Uses the chat page in headless Chromium: node page.mjs URL KEY FOLDER SCENARIO...
// Prints { scenario: what was seen, or { failure } } as one JSON object; screenshots go to FOLDER.
import { chromium } from "playwright-core";

const [url, key, folder, ...names] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath: "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});

async function open(viewport = { width: 1200, height: 800 }) {
  const page = await (await browser.newContext({ viewport })).newPage();
  page.setDefaultTimeout(60_000);
  page.seen = { hosts: new Set(), problems: [] };
  page.on("request", (request) => page.seen.hosts.add(new URL(request.url()).host));
  page.on("console", (message) => message.type() === "error" && page.seen.problems.push(message.text()));
  page.on("pageerror", (error) => page.seen.problems.push(String(error)));
  await page.goto(url);
  return page;
}

// with the keyboard alone, as someone without a mouse does
async function giveKey(page) {
  await page.locator("#settings summary").focus();
  await page.keyboard.press("Enter");
  for (let i = 0; i < 20 && (await focused(page)) !== "key"; i++) await page.keyboard.press("Tab");
  await page.keyboard.type(key);
  await page.keyboard.press("Tab");
  await page.waitForFunction(() => document.getElementById("model").dataset.known === "yes");
}

const focused = (page) => page.evaluate(() => document.activeElement.id);
const answers = (page) => page.locator("#messages li.assistant");

async function say(page, text) {
  await page.locator("#input").focus();
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
}

async function firstText(page) {
  await page.waitForFunction(() => document.querySelector("#messages li.streaming")?.textContent);
}

async function finished(page) {
  await page.waitForFunction(() => !document.querySelector("#messages li.streaming") && document.getElementById("stop").hidden);
}

const scenarios = {
  async send() {
    const page = await open();
    const startFocus = await focused(page);
    await giveKey(page);
    await page.evaluate(() => {
      window.lengths = [];
      const look = () => window.lengths.push(document.querySelector("#messages li.assistant")?.textContent.length ?? 0);
      new MutationObserver(look).observe(document.getElementById("messages"), { childList: true, subtree: true, characterData: true });
    });
    await say(page, "Tell me about the sea.");
    await firstText(page);
    const isStopShown = await page.locator("#stop").isVisible();
    await finished(page);
    await page.screenshot({ path: `${folder}/wide.png` });
    return {
      startFocus,
      isStopShown,
      lengths: await page.evaluate(() => [...new Set(window.lengths)]),
      answer: await answers(page).textContent(),
      status: await page.locator("#status").textContent(),
      endFocus: await focused(page),
      model: await page.locator("#model").textContent(),
      hosts: [...page.seen.hosts],
      problems: page.seen.problems.filter((text) => !text.includes("401")),
    };
  },

  async turns() {
    const page = await open();
    await giveKey(page);
    const bodies = [];
    page.on("request", (request) => request.method() === "POST" && bodies.push(request.postDataJSON()));
    await page.locator("#system").fill("Be brief.");
    await page.locator("#max_tokens").fill("5");
    await page.locator("#seed").fill("7");
    await say(page, "one");
    await finished(page);
    await page.locator("#input").pressSequentially("two");
    await page.keyboard.press("Shift+Enter");
    await page.locator("#input").pressSequentially("lines");
    await page.locator("#send").click();
    await finished(page);
    return { bodies, answers: await answers(page).allTextContents(), status: await page.locator("#status").textContent() };
  },

  async stopButton() {
    const page = await open();
    await giveKey(page);
    await say(page, "go on");
    await firstText(page);
    await page.waitForFunction(() => document.getElementById("slots-text").textContent.startsWith("1 of"));
    await page.waitForFunction(() => Number(document.getElementById("rate").textContent) > 0);
    const running = await page.locator("#running").textContent();
    await page.locator("#stop").click();
    await finished(page);
    await page.waitForFunction(() => document.getElementById("slots-text").textContent.startsWith("0 of"));
    const [answer, status] = [await answers(page).textContent(), await page.locator("#status").textContent()];
    return { running, answer, status, blocks: await page.locator("#blocks-text").textContent(), focus: await focused(page) };
  },

  async escape() {
    const page = await open();
    await giveKey(page);
    await say(page, "go on");
    await firstText(page);
    await page.keyboard.press("Escape");
    await finished(page);
    return { answer: await answers(page).textContent(), status: await page.locator("#status").textContent() };
  },

  async reload() {
    const page = await open();
    await giveKey(page);
    await page.locator("#temperature").fill("0.3");
    await page.locator("#temperature").blur();
    await say(page, "go on");
    await firstText(page);
    await page.reload();
    const shown = await page.locator("#messages li").allTextContents();
    const temperature = await page.locator("#temperature").inputValue();
    await page.waitForFunction(() => document.getElementById("model").dataset.known === "yes");
    await page.waitForFunction(() => document.getElementById("running").textContent === "0");
    await page.locator("#clear").click();
    const numAfterClear = await page.locator("#messages li").count();
    return { shown, temperature, numAfterClear, isHintShown: await page.locator("#empty").isVisible() };
  },

  async clearWhileAnswering() {
    const page = await open();
    await giveKey(page);
    await say(page, "go on");
    await firstText(page);
    await page.locator("#clear").click();
    await finished(page);
    return { numMessages: await page.locator("#messages li").count(), kept: await page.evaluate(() => sessionStorage.getItem("deltafold.messages")) };
  },

  async narrow() {
    const page = await open({ width: 360, height: 720 });
    await giveKey(page);
    await page.locator("#max_tokens").fill("40");
    await say(page, "A long word: " + "x".repeat(80));
    await finished(page);
    await page.locator("#input").scrollIntoViewIfNeeded();
    await page.screenshot({ path: `${folder}/narrow.png`, fullPage: true });
    const box = await page.locator("#send").boundingBox();
    const { scrollWidth, clientWidth } = await page.evaluate(() => document.documentElement);
    return { width: await page.evaluate(() => document.documentElement.scrollWidth), scrollWidth, clientWidth, sendRight: box.x + box.width, sendWidth: box.width };
  },

  async refused() {
    const page = await open();
    await page.waitForFunction(() => document.getElementById("model").dataset.known === "no");
    const model = await page.locator("#model").textContent();
    await say(page, "hello");
    const error = await page.locator("#messages li.error").textContent();
    return { model, error, isSendShown: await page.locator("#send").isVisible() };
  },

  async tooLong() {
    const page = await open();
    await giveKey(page);
    await page.locator("#max_tokens").fill("100000");
    await say(page, "hello");
    return { error: await page.locator("#messages li.error").textContent() };
  },
};

const found = {};
for (const name of names) {
  try {
    found[name] = await scenarios[name]();
  } catch (error) {
    found[name] = { failure: String(error) };
  }
}
await browser.close();
console.log(JSON.stringify(found));
