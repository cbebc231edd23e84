"""What players are told and asked, in English (`en`) and Chinese (`zh`).

    words = Words("en")
    words.brief(table, seat)        the system prompt of a seat: the rules, its role, and for a wolf its pack
    words.tell(notice)              what happened, as those hear it who may
    words.ask(question, day)        what is wanted, and how the answer is to look
    words.examples(seat)            questions and answers of no game, for models that need to see the form

Nothing here tells a player another's role: seats are called Player 3 or 3号玩家, whatever the gateway calls them.
"""

from collections.abc import Iterable
from typing import Any, Literal

from game import Ask, Notice, Table

Language = Literal["en", "zh"]

EN = {
    "name": "Player {}",
    "and": ", ",
    "nobody": "nobody",
    "choice": "CHOICE:",
    "wolf": "a werewolf",
    "villager": "a villager",
    "seer": "the seer",
    "witch": "the witch",
    "hunter": "the hunter",
    "brief": (
        "You are {me} in a game of werewolf. The players are {all}: three werewolves, three villagers, a seer, a witch "
        "and a hunter. Nobody knows the roles of others, but for the werewolves, who know each other.\n"
        "At night the werewolves kill somebody, the witch may use a potion, and the seer learns of one player whether "
        "it is a werewolf. By day everybody speaks in turn and then votes somebody out.\n"
        "The village wins when no werewolf is left. The werewolves win when the villagers are all dead, or when the "
        "seer, the witch and the hunter are.\n"
        "You are {role}. {hint}\n"
        "Speak only as yourself, in a few sentences. When you have to choose, the last line of your answer is\n"
        "CHOICE: and a player, like Player 3, or nobody."
    ),
    "hint wolf": "Your pack is {pack}. By day pass for a villager, and turn suspicion on others.",
    "hint villager": "You have no power but your voice and your vote. Watch who says what, and find the werewolves.",
    "hint seer": "Let the village profit from what you see, but the werewolves will hunt you once they know you.",
    "hint witch": (
        "You have a cure for whom the werewolves attack and a poison for anybody, each once, one of them a night. "
        "Yourself you can cure in the first night only."
    ),
    "hint hunter": (
        "When the werewolves kill you or the village votes you out you may shoot somebody. Poisoned you may not."
    ),
    "night": "Night {day} falls.",
    "plan": "{seat} to the pack: {words}",
    "plan choice": " ({choice})",
    "hunt": "The pack kills {choice}.",
    "check wolf": "You see that {choice} is a werewolf.",
    "check good": "You see that {choice} is not a werewolf.",
    "dawn": "Day {day} breaks. Dead: {dead}.",
    "dawn none": "Day {day} breaks. Nobody died.",
    "speak": "{seat}: {words}",
    "silent": "{seat} says nothing.",
    "vote": "Votes: {ballots}.",
    "ballot": "{voter} for {choice}",
    "tie": "A tie between {seats}. There is one more vote, among them.",
    "verdict": "{dead} is voted out.",
    "verdict none": "Nobody is voted out.",
    "shoot": "{seat} was the hunter and shoots {choice}.",
    "end wolves": "The werewolves win.",
    "end village": "The village wins.",
    "end none": "Nobody has won.",
    "ask plan": "Night {day}: talk to your pack. Whom will you kill?",
    "ask hunt": "Night {day}: the pack does not agree. Name whom you kill.",
    "ask heal": "Night {day}: the werewolves attack {options}. Do you use your cure?",
    "ask poison": "Night {day}: do you use your poison, and on whom?",
    "ask check": "Night {day}: whom do you look at?",
    "ask speak": "Day {day}: it is your turn to speak. What do you say to all?",
    "ask vote": "Day {day}: whom do you vote out?",
    "ask shoot": "You are dead, and you are the hunter. Whom do you shoot?",
    "form": "Choose one of these: {options}.",
    "example": "This is how answers look.",
    "speech": "I have listened to all of you. {} has said little so far.",
}
ZH = {
    "name": "{}号玩家",
    "and": "、",
    "nobody": "无人",
    "choice": "选择：",
    "wolf": "狼人",
    "villager": "村民",
    "seer": "预言家",
    "witch": "女巫",
    "hunter": "猎人",
    "brief": (
        "你是狼人杀游戏中的{me}。全部玩家：{all}。其中有三名狼人、三名村民、一名预言家、一名女巫和一名猎人。"
        "只有狼人互相认识，其他人不知道别人的身份。\n"
        "夜里狼人杀一人，女巫可以用药，预言家查验一人是不是狼人。白天大家依次发言，然后投票放逐一人。\n"
        "狼人全部出局，好人获胜；村民全部死亡，或预言家、女巫、猎人全部死亡，狼人获胜。\n"
        "你的身份是{role}。{hint}\n"
        "只以自己的身份说话，几句即可。需要选择时，回答的最后一行写\n"
        "选择：加一名玩家，例如3号玩家，或者写无人。"
    ),
    "hint wolf": "你们狼人是：{pack}。白天要装作好人，把怀疑引向别人。",
    "hint villager": "你没有技能，只有发言和投票。留意每个人的话，找出狼人。",
    "hint seer": "让大家用上你的查验结果，但身份一旦暴露，狼人会先杀你。",
    "hint witch": (
        "你有一瓶解药，可救被狼人袭击的人；有一瓶毒药，可毒任何人。各用一次，一夜只能用一瓶。自救只限第一夜。"
    ),
    "hint hunter": "被狼人杀死或被投票放逐时，你可以开枪带走一人；被毒死则不能。",
    "night": "第{day}夜来临。",
    "plan": "{seat}对同伴说：{words}",
    "plan choice": "（{choice}）",
    "hunt": "狼人杀{choice}。",
    "check wolf": "你看到{choice}是狼人。",
    "check good": "你看到{choice}不是狼人。",
    "dawn": "第{day}天天亮。死者：{dead}。",
    "dawn none": "第{day}天天亮。昨夜无人死亡。",
    "speak": "{seat}：{words}",
    "silent": "{seat}没有说话。",
    "vote": "投票：{ballots}。",
    "ballot": "{voter}投{choice}",
    "tie": "{seats}平票。在他们之中再投一次。",
    "verdict": "{dead}被放逐。",
    "verdict none": "无人被放逐。",
    "shoot": "{seat}是猎人，开枪带走{choice}。",
    "end wolves": "狼人获胜。",
    "end village": "好人获胜。",
    "end none": "没有人获胜。",
    "ask plan": "第{day}夜：和同伴商量，杀谁？",
    "ask hunt": "第{day}夜：你们没有谈拢。写出你要杀的人。",
    "ask heal": "第{day}夜：狼人袭击了{options}。用解药吗？",
    "ask poison": "第{day}夜：用毒药吗？毒谁？",
    "ask check": "第{day}夜：查验谁？",
    "ask speak": "第{day}天：轮到你发言。你对大家说什么？",
    "ask vote": "第{day}天：你投票放逐谁？",
    "ask shoot": "你死了，你是猎人。开枪带走谁？",
    "form": "请选下列之一：{options}。",
    "example": "回答的样子如下。",
    "speech": "我听了大家的话。{}说得很少。",
}
TEXTS: dict[Language, dict[str, str]] = {"en": EN, "zh": ZH}


class Words:
    """
    >>> Words("en").ask(Ask("vote", 1, (2, 5)), 3)
    'Day 3: whom do you vote out?\\nChoose one of these: Player 2, Player 5, nobody.'
    >>> Words("zh").tell(Notice("shoot", (1,), {"seat": 8, "choice": 2}))
    '8号玩家是猎人，开枪带走2号玩家。'
    """

    def __init__(self, language: Language) -> None:
        if language not in TEXTS:
            raise ValueError(f"there is no language {language!r}. Fix: take one of {', '.join(TEXTS)}")
        self._texts = TEXTS[language]

    def name(self, seat: int) -> str:
        return self._texts["name"].format(seat)

    def names(self, seats: Iterable[int]) -> str:
        return self._texts["and"].join(map(self.name, seats))

    def choice(self, seat: int | None) -> str:
        """What a choice is called; None is nobody."""
        return self._texts["nobody"] if seat is None else self.name(seat)

    def choose(self, seat: int | None) -> str:
        """A choice in the form that is asked for."""
        return f"{self._texts['choice']} {self.choice(seat)}"

    def brief(self, table: Table, seat: int) -> str:
        role, pack = table.roles[seat], [one for one in table.seats("wolf") if one != seat]
        hint = self._texts[f"hint {role}"].format(pack=self.names(pack))
        return self._texts["brief"].format(
            me=self.name(seat), all=self.names(table.roles), role=self._texts[role], hint=hint
        )

    def ask(self, question: Ask, day: int) -> str:
        said = self._texts[f"ask {question.kind}"].format(day=day, options=self.names(question.options))
        if not question.options:
            return said
        options = [self.name(seat) for seat in question.options]
        options += [self._texts["nobody"]] if question.may_pass else []
        return said + "\n" + self._texts["form"].format(options=self._texts["and"].join(options))

    def examples(self, seat: int) -> list[tuple[str, str]]:
        """
        >>> [answer for _, answer in Words("en").examples(3)][2:]
        ['I have listened to all of you. Player 5 has said little so far.', 'CHOICE: Player 5']
        """
        first, second, third = [one for one in (4, 5, 6, 7) if one != seat][:3]
        return [
            (f"{self._texts['example']}\n{self.ask(Ask('poison', seat, (first, third)), 1)}", self.choose(None)),
            (self.ask(Ask("check", seat, (first, third)), 1), self.choose(third)),
            (self.ask(Ask("speak", seat), 1), self._texts["speech"].format(self.name(second))),
            (self.ask(Ask("vote", seat, (first, second, third)), 1), self.choose(second)),
        ]

    def tell(self, notice: Notice) -> str:
        """A sentence or two for those who learn of it."""
        data = notice.data
        match notice.scene:
            case "plan" | "speak" if not data["words"] and data.get("choice") is None:
                return self._fill("silent", data)
            case "plan":
                said = self._fill("plan", data)
                return said + (self._fill("plan choice", data) if data["choice"] is not None else "")
            case "check":
                return self._fill("check wolf" if data["wolf"] else "check good", data)
            case "dawn" | "verdict" if not data["dead"]:
                return self._fill(f"{notice.scene} none", data)
            case "vote":
                ballots = [
                    self._texts["ballot"].format(voter=self.name(voter), choice=self.choice(choice))
                    for voter, choice in data["ballots"].items()
                ]
                return self._texts["vote"].format(ballots=self._texts["and"].join(ballots))
            case "end":
                return self._texts[f"end {data['winner'] or 'none'}"]
            case _:
                return self._fill(notice.scene, data)

    def _fill(self, key: str, data: dict[str, Any]) -> str:
        shown = dict(data)
        for one in ("dead", "seats"):
            if one in shown:
                shown[one] = self.names(shown[one])
        if "seat" in shown:
            shown["seat"] = self.name(shown["seat"])
        if "choice" in shown:
            shown["choice"] = self.choice(shown["choice"])
        return self._texts[key].format(**shown)
