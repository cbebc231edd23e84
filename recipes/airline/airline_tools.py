"""What an airline's agent can do: the tools of tau2-bench's airline, over a `Database`.

They hold to what the database needs (a flight that can be booked, a payment that adds up) and not to the airline's
policy: that is for the agent to keep. What goes wrong is said to the model. Every tool is `async` and never waits, so
that of several calls of one answer each is done before the next.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from database import Database, NotThere, Row

import strop

NOW = "2024-05-15T15:00:00"
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
INSURANCE, BAG = 30, 50
CHANGES = ("book_", "update_", "cancel_", "send_")
"""What tools that change something begin with."""
CITIES = {
    "SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas",
    "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston", "PHX": "Phoenix",
    "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark", "CLT": "Charlotte",
    "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "LaGuardia",
}  # fmt: skip
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
Cabin = Literal["basic_economy", "economy", "business"]


class FlightChoice(TypedDict):
    flight_number: str
    date: str


class Passenger(TypedDict):
    first_name: str
    last_name: str
    dob: str


class Payment(TypedDict):
    payment_id: str
    amount: int


class Refused(ValueError):
    """It cannot be done: the model is told why."""


class AirlineTools:
    """The tools of one conversation."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- looking -------------------------------------------------------------------------------------------------------

    @strop.tool
    async def get_user_details(self, user_id: str) -> Row:
        """Look a user up: profile, payment methods, reservation ids."""
        return self.database.user(user_id)

    @strop.tool
    async def get_reservation_details(self, reservation_id: str) -> Row:
        """Look a reservation up: flights, passengers, payments, bags."""
        return self.database.reservation(reservation_id)

    @strop.tool
    async def get_flight_status(self, flight_number: str, date: str) -> str:
        """Say whether a flight is available, delayed, on time, flying, landed or cancelled on a day (YYYY-MM-DD)."""
        return self._day(flight_number, date)["status"]

    @strop.tool
    async def list_all_airports(self) -> list[Row]:
        """List the airports with their cities."""
        return [{"iata": code, "city": city} for code, city in CITIES.items()]

    @strop.tool
    async def search_direct_flight(self, origin: str, destination: str, date: str) -> list[Row]:
        """Search for direct flights on a day (YYYY-MM-DD) that can be booked, by airports such as JFK."""
        return list(self._search(date, origin=origin, destination=destination))

    @strop.tool
    async def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[Row]]:
        """Search for pairs of flights with one stop that can be booked, the first of them on a day (YYYY-MM-DD)."""
        found: list[list[Row]] = []
        for first in self._search(date, origin=origin):
            if first["destination"] == destination:
                continue
            lands = first["scheduled_arrival_time_est"]
            day = f"2024-05-{int(date[-2:]) + 1:02d}" if lands.endswith("+1") else date
            found += [
                [{**first, "date": date}, {**second, "date": day}]
                for second in self._search(day, origin=first["destination"], destination=destination)
                if second["scheduled_departure_time_est"] >= lands.removesuffix("+1")
            ]
        return found

    @strop.tool
    async def calculate(self, expression: str) -> str:
        """Compute an expression of numbers, + - * / and brackets."""
        return f"{round(_compute(ast.parse(expression, mode='eval').body), 2):g}"

    @strop.tool
    async def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human, with a summary of what they want."""
        return "Transfer successful"

    # -- changing ------------------------------------------------------------------------------------------------------

    @strop.tool
    async def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: Literal["one_way", "round_trip"],
        cabin: Cabin,
        flights: list[FlightChoice],
        passengers: list[Passenger],
        payment_methods: list[Payment],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Literal["yes", "no"],
    ) -> Row:
        """Book flights for some passengers, paid with methods of the user's profile."""
        user = self.database.user(user_id)
        chosen = [self._choose(flight, cabin, len(passengers)) for flight in flights]
        per_passenger = sum(flight["price"] for flight in chosen) + (INSURANCE if insurance == "yes" else 0)
        total = per_passenger * len(passengers) + BAG * nonfree_baggages
        paid = sum(payment["amount"] for payment in payment_methods)
        if paid != total:
            raise Refused(f"the price is {total}, and {paid} would be paid")
        for payment in payment_methods:
            self._check_funds(user, payment["payment_id"], payment["amount"])
        for payment in payment_methods:
            self._take(user, payment["payment_id"], payment["amount"])
        id = next(id for id in NEW_RESERVATIONS if not self.database.is_taken(id))
        reservation: Row = {
            "reservation_id": id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": chosen,
            "passengers": passengers,
            "payment_history": payment_methods,
            "created_at": NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        self.database.add(id, reservation)
        user["reservations"].append(id)
        return reservation

    @strop.tool
    async def update_reservation_flights(
        self, reservation_id: str, cabin: Cabin, flights: list[FlightChoice], payment_id: str
    ) -> Row:
        """Change the flights or the cabin of a reservation. Give all flights, also those that stay."""
        reservation = self.database.reservation(reservation_id)
        user, many = self.database.user(reservation["user_id"]), len(reservation["passengers"])
        kept = {(flight["flight_number"], flight["date"]): flight for flight in reservation["flights"]}
        stays = cabin == reservation["cabin"]
        chosen = [
            old if stays and (old := kept.get((one["flight_number"], one["date"]))) else self._choose(one, cabin, many)
            for one in flights
        ]
        more = many * (sum(one["price"] for one in chosen) - sum(one["price"] for one in reservation["flights"]))
        self._pay_difference(user, reservation, payment_id, more)
        reservation["flights"], reservation["cabin"] = chosen, cabin
        return reservation

    @strop.tool
    async def update_reservation_passengers(self, reservation_id: str, passengers: list[Passenger]) -> Row:
        """Change who flies. Their number stays."""
        reservation = self.database.reservation(reservation_id)
        if len(passengers) != len(reservation["passengers"]):
            raise Refused("the number of passengers cannot change")
        reservation["passengers"] = passengers
        return reservation

    @strop.tool
    async def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> Row:
        """Change the number of bags, and how many of them are paid for."""
        reservation = self.database.reservation(reservation_id)
        more = BAG * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        self._pay_difference(self.database.user(reservation["user_id"]), reservation, payment_id, more)
        reservation["total_baggages"], reservation["nonfree_baggages"] = total_baggages, nonfree_baggages
        return reservation

    @strop.tool
    async def cancel_reservation(self, reservation_id: str) -> Row:
        """Cancel a reservation and pay back what was paid."""
        reservation = self.database.reservation(reservation_id)
        back = [
            {"payment_id": payment["payment_id"], "amount": -payment["amount"]}
            for payment in reservation["payment_history"]
        ]
        reservation["payment_history"] = [*reservation["payment_history"], *back]
        reservation["status"] = "cancelled"
        return reservation

    @strop.tool
    async def send_certificate(self, user_id: str, amount: int) -> str:
        """Send a user a certificate of some dollars."""
        methods = self.database.user(user_id)["payment_methods"]
        id = next(id for id in NEW_CERTIFICATES if id not in methods)
        methods[id] = {"source": "certificate", "amount": amount, "id": id}
        return f"Certificate {id} of {amount} was added to user {user_id}"

    # -- flights and money ---------------------------------------------------------------------------------------------

    def _day(self, number: str, date: str) -> Row:
        days = self.database.flight(number)["dates"]
        if date not in days:
            raise NotThere(f"flight {number} does not fly on {date}")
        return days[date]

    def _search(self, date: str, origin: str, destination: str = "") -> Iterable[Row]:
        for flight in self.database.flights():
            day = flight["dates"].get(date)
            if flight["origin"] != origin or destination not in ("", flight["destination"]):
                continue
            if day is not None and day["status"] == "available":
                yield {**{name: value for name, value in flight.items() if name != "dates"}, **day}

    def _choose(self, choice: FlightChoice, cabin: str, seats: int) -> Row:
        """A flight as a reservation has it, at today's price."""
        number, date = choice["flight_number"], choice["date"]
        flight, day = self.database.flight(number), self._day(number, date)
        if day["status"] != "available":
            raise Refused(f"flight {number} of {date} cannot be booked: it is {day['status']}")
        if day["available_seats"][cabin] < seats:
            raise Refused(f"flight {number} of {date} has not {seats} seats in {cabin}")
        where = {"origin": flight["origin"], "destination": flight["destination"]}
        return {"flight_number": number, "date": date, "price": day["prices"][cabin], **where}

    def _pay_difference(self, user: Row, reservation: Row, payment_id: str, amount: int) -> None:
        """Pay, or be paid back where `amount` is below 0."""
        method = self._method(user, payment_id)
        if method["source"] == "certificate":
            raise Refused("a certificate cannot be used for changes")
        if amount == 0:
            return
        self._check_funds(user, payment_id, amount)
        if amount > 0:
            self._take(user, payment_id, amount)
        payment = {"payment_id": payment_id, "amount": amount}
        reservation["payment_history"] = [*reservation["payment_history"], payment]

    def _method(self, user: Row, payment_id: str) -> Row:
        if payment_id not in user["payment_methods"]:
            raise NotThere(f"the user has no payment method {payment_id}")
        return user["payment_methods"][payment_id]

    def _check_funds(self, user: Row, payment_id: str, amount: int) -> None:
        method = self._method(user, payment_id)
        if method["source"] != "credit_card" and method["amount"] < amount:
            raise Refused(f"{payment_id} has {method['amount']}, and {amount} is to be paid")

    def _take(self, user: Row, payment_id: str, amount: int) -> None:
        """Gift cards get less, a certificate is used up."""
        method = self._method(user, payment_id)
        if method["source"] == "gift_card":
            method["amount"] -= amount
        elif method["source"] == "certificate":
            del user["payment_methods"][payment_id]


def _compute(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_compute(left), _compute(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand)
        case _:
            raise Refused("this is not an expression of numbers")
